import { call } from "../api.js";
import { addressed, bars, caller, field, modelChoice, modelField, textArea, timings } from "../controls.js";
import { element, refill, show } from "../dom.js";

const QUERY = "Who won the match?";
const EXAMPLE = "Shares fell after the bank's report\nThe home team won the final after extra time\nScientists find water on a distant planet\nThe goalkeeper saved a penalty";

/** Ranked texts with bars: a score as it is, a bar by its place between the worst and the best. */
function ranking(results, texts) {
  const scores = results.map(({ score = 0 }) => score);
  const [most, least] = [Math.max(...scores), Math.min(...scores, 0)];
  const share = (score) => (most > least ? (score - least) / (most - least) : 1);
  return bars(results.map(({ index = 0, score = 0 }, place) => [texts[index], share(score), place === 0, score.toFixed(3)]));
}

export const rank = {
  id: "rank",
  title: "Rank texts",
  tab: "Rank",
  lead: "Texts in the order of their relevance to a query, by a reranker or an embedding model.",
  capabilities: ["rank_text"],
  open(place, served) {
    const rerankers = served.filter(({ task }) => task === "text_scoring");
    const model = modelChoice([...rerankers, ...served.filter((one) => !rerankers.includes(one))]);
    const query = element("input", { type: "text", value: QUERY, required: true });
    const texts = textArea(EXAMPLE, 6, { required: true });
    const form = caller({
      fields: [modelField(model), field("Query", query), field("Texts", texts, "One per line. Ctrl+Enter sends.")],
      label: "Rank",
      example() {
        refill(query, QUERY);
        refill(texts, EXAMPLE);
      },
      prepare: () => ({
        service: "RankingService",
        method: "RankTexts",
        request: {
          ...addressed(model, served),
          queryText: query.value,
          texts: texts.value.split("\n").filter((line) => line.trim()),
        },
      }),
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        show(output, ranking(answer.results, prepared.request.texts), timings(answer));
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
