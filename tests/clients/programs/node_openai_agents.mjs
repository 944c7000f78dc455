// OpenAI Agents SDK for JavaScript.
// npm: @openai/agents@0.20.0 openai@7.57.0 zod@4.6.7

import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

import { BASE, CHAT, SENTENCE, check, run, test } from "./cases.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: BASE, apiKey: "none", maxRetries: 0 });
const model = new OpenAIChatCompletionsModel(client, CHAT);
const runner = new Runner({ tracingDisabled: true });
const weather = tool({
  name: "weather",
  description: "Says what it is like outside.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `rain in ${city}`,
});

test("chat", async () => {
  const answer = await runner.run(new Agent({ name: "Teller", model }), "Who sat?");
  check(answer.finalOutput === SENTENCE, answer.finalOutput);
});

test("stream", async () => {
  const answer = await runner.run(new Agent({ name: "Teller", model }), "Who sat?", { stream: true });
  let said = "";
  for await (const piece of answer.toTextStream()) said += piece;
  check(said === SENTENCE, said);
});

test("agent with a tool", async () => {
  const answer = await runner.run(new Agent({ name: "Forecaster", model, tools: [weather] }), "Rain?");
  check(answer.finalOutput === SENTENCE, answer.finalOutput);
  check(JSON.stringify(answer.newItems).includes(`rain in ${SENTENCE}`), answer.newItems);
});

test("structured output", async () => {
  const outputType = z.object({ name: z.string(), inhabitants: z.number() });
  const answer = await runner.run(new Agent({ name: "Teller", model, outputType }), "A city");
  check(answer.finalOutput.name === SENTENCE, answer.finalOutput);
});

test("responses", async () => {
  const agent = new Agent({ name: "Teller", model: new OpenAIResponsesModel(client, CHAT) });
  check((await runner.run(agent, "Who sat?")).finalOutput === SENTENCE);
});

await run();
