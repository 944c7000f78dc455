// Cohere for JavaScript.
// npm: cohere-ai@8.1.0

import { CohereClient, CohereClientV2 } from "cohere-ai";

import { HTTP, SCORER, check, run, test } from "./cases.mjs";

for (const [name, Client] of [["v1", CohereClient], ["v2", CohereClientV2]]) {
  test(`rerank ${name}`, async () => {
    const client = new Client({ environment: HTTP, token: "none" });
    const answer = await client.rerank({ model: SCORER, query: "goal", documents: ["bank price", "goal match"], topN: 1 });
    check(answer.results.length === 1 && answer.results[0].index === 1, answer);
  });
}

await run();
