// Hugging Face's inference for JavaScript.
// npm: @huggingface/inference@4.13.30

import { InferenceClient } from "@huggingface/inference";

import { BASE, CHAT, SENTENCE, check, run, test } from "./cases.mjs";

const client = new InferenceClient("none", { endpointUrl: BASE });
const ask = { model: CHAT, messages: [{ role: "user", content: "Who sat?" }] };

test("chat", async () => {
  const answer = await client.chatCompletion(ask);
  check(answer.choices[0].message.content === SENTENCE, answer);
});

test("stream", async () => {
  let said = "";
  for await (const piece of client.chatCompletionStream(ask)) said += piece.choices[0]?.delta.content ?? "";
  check(said === SENTENCE, said);
});

await run();
