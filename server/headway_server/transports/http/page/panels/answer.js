import { call } from "../api.js";
import { addressed, caller, field, modelChoice, modelField, number, textArea, timings } from "../controls.js";
import { characters, element, refill, show } from "../dom.js";

const EXAMPLE =
  "The lighthouse was built in 1851 by the engineer Alan Stevenson. A storm broke its lamp in the winter of 1862, and the keeper lit a fire on the roof until spring.";
const QUESTION = "Who built the lighthouse?";

/** The context with an answer marked. */
function marked(context, { span: { start = 0, end }, score = 0 }) {
  const all = characters(context);
  const part = (from, to) => all.slice(from, to).join("");
  const mark = element("mark", { class: "tag-colour-0" }, part(start, end), element("small", {}, `score ${score.toFixed(3)}`));
  return element("p", { class: "tagged" }, part(0, start), mark, part(end));
}

export const answer = {
  id: "answer",
  title: "Answer questions",
  tab: "Answer",
  lead: "Finds the part of a text that answers a question.",
  capabilities: ["answer_question"],
  open(place, served) {
    const model = modelChoice(served);
    const question = element("input", { type: "text", value: QUESTION, required: true });
    const context = textArea(EXAMPLE, 8, { required: true });
    const threshold = number({ min: -1, max: 1, step: 0.05 });
    const form = caller({
      fields: [
        modelField(model),
        field("Question", question),
        field("Text", context),
        field("No-answer threshold", threshold, "Empty: always an answer"),
      ],
      label: "Answer",
      example() {
        refill(question, QUESTION);
        refill(context, EXAMPLE);
      },
      prepare: () => ({
        service: "QuestionAnsweringService",
        method: "AnswerQuestion",
        request: {
          ...addressed(model, served),
          questions: [question.value],
          contexts: [context.value],
          noAnswerThreshold: threshold.given(),
        },
      }),
      async run(prepared, signal, output) {
        const found = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [{ answers = [], noAnswerScore = 0 }] = found.results;
        const [best] = answers;
        const none = element("p", { class: "empty" }, `No answer (score ${noAnswerScore.toFixed(3)})`);
        show(output, best ? element("h3", { class: "quote" }, best.text) : none, best ? marked(prepared.request.contexts[0], best) : null, timings(found));
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
