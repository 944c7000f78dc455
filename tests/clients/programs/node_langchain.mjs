// LangChain for JavaScript.
// npm: @langchain/openai@1.6.0 @langchain/core@1.4.0 zod@4.6.7

import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";

import { BASE, CHAT, SENTENCE, VECTORS, check, run, test } from "./cases.mjs";

const common = { apiKey: "none", maxRetries: 0, configuration: { baseURL: BASE } };
const model = new ChatOpenAI({ model: CHAT, ...common });
const City = z.object({ name: z.string(), inhabitants: z.number() });
const weather = tool(({ city }) => `rain in ${city}`, {
  name: "weather", description: "Says what it is like outside.", schema: z.object({ city: z.string() }),
});

test("chat", async () => {
  const answer = await model.invoke("Who sat?");
  check(answer.content === SENTENCE && answer.usage_metadata.output_tokens === 4, answer);
});

test("stream", async () => {
  let said = "";
  for await (const piece of await model.stream("Who sat?")) said += piece.content;
  check(said === SENTENCE, said);
});

test("completions", async () => {
  check(await new OpenAI({ model: "shakespeare", maxTokens: 8, ...common }).invoke("ROMEO:"));
});

test("tools", async () => {
  const [call] = (await model.bindTools([weather]).invoke("Rain?")).tool_calls;
  check(call.args.city === SENTENCE, call);
});

for (const method of ["jsonSchema", "functionCalling"]) {
  test(`structured output, ${method}`, async () => {
    const answer = await model.withStructuredOutput(City, { method }).invoke("A city");
    check(answer.name === SENTENCE, answer);
  });
}

test("embeddings", async () => {
  const vectors = new OpenAIEmbeddings({ model: VECTORS, ...common });
  check((await vectors.embedDocuments(["a cat", "a dog"])).length === 2);
});

await run();
