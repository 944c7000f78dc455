// Vercel AI SDK.
// npm: ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { BASE, CHAT, SENTENCE, THOUGHT, VECTORS, check, run, test } from "./cases.mjs";

const openai = createOpenAI({ baseURL: BASE, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "headway", baseURL: BASE, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const City = z.object({ name: z.string(), inhabitants: z.number() });
const weather = tool({
  description: "Says what it is like outside.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `rain in ${city}`,
});

for (const [name, model] of [["@ai-sdk/openai", openai.chat(CHAT)], ["@ai-sdk/openai-compatible", compatible(CHAT)]]) {
  const common = { model, prompt: "Who sat?", maxRetries: 0 };

  test(`${name}: text`, async () => {
    const answer = await generateText(common);
    check(answer.text === SENTENCE && answer.usage.outputTokens === 4, answer.usage);
  });

  test(`${name}: stream`, async () => {
    const answer = streamText(common);
    let said = "";
    for await (const piece of answer.textStream) said += piece;
    check(said === SENTENCE && (await answer.usage).outputTokens === 4, said);
  });

  test(`${name}: tools in steps`, async () => {
    const answer = await generateText({ ...common, tools: { weather }, stopWhen: stepCountIs(3) });
    check(answer.steps.length === 2 && answer.text === SENTENCE, answer.steps);
    check(answer.steps[0].toolResults[0].output === `rain in ${SENTENCE}`, answer.steps);
  });

  test(`${name}: object`, async () => {
    const answer = await generateText({ ...common, output: Output.object({ schema: City }) });
    check(answer.output.name === SENTENCE, answer.output);
  });
}

test("reasoning", async () => {
  const providerOptions = { headway: { chat_template_kwargs: { enable_thinking: true } } };
  const answer = await generateText({ model: compatible(CHAT), prompt: "Who sat?", providerOptions, maxRetries: 0 });
  check(answer.reasoningText === THOUGHT, answer.reasoningText);
});

test("completions", async () => {
  const model = compatible.completionModel("shakespeare");
  check((await generateText({ model, prompt: "ROMEO:", maxOutputTokens: 8, maxRetries: 0 })).text);
});

test("embeddings", async () => {
  for (const model of [openai.embedding(VECTORS), compatible.embeddingModel(VECTORS)]) {
    const answer = await embedMany({ model, values: ["a cat", "a dog"], maxRetries: 0 });
    check(answer.embeddings.length === 2);
  }
});

test("responses", async () => {
  const answer = await generateText({ model: openai(CHAT), prompt: "Who sat?", maxRetries: 0 });
  check(answer.text === SENTENCE, answer.text);
});

await run();
