// OpenAI for JavaScript.
// npm: openai@7.57.0 zod@4.6.7

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { BASE, CHAT, SENTENCE, THOUGHT, VECTORS, check, run, test } from "./cases.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: "none", maxRetries: 0 });
const ASK = { model: CHAT, messages: [{ role: "user", content: "Who sat?" }] };
const City = z.object({ name: z.string(), inhabitants: z.number() });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = (args) => `rain in ${args.city}`;

test("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  check(names.includes(CHAT), names);
});

test("completions", async () => {
  const answer = await client.completions.create({ model: "shakespeare", prompt: "ROMEO:", max_tokens: 8 });
  check(answer.choices[0].text);
});

test("chat", async () => {
  const answer = await client.chat.completions.create(ASK);
  check(answer.choices[0].message.content === SENTENCE, answer);
});

test("stream", async () => {
  let said = "";
  const pieces = await client.chat.completions.create({ ...ASK, stream: true, stream_options: { include_usage: true } });
  for await (const piece of pieces) said += piece.choices[0]?.delta.content ?? "";
  check(said === SENTENCE, said);
  const final = await client.chat.completions.stream(ASK).finalChatCompletion();
  check(final.choices[0].message.content === SENTENCE, final);
});

test("reasoning", async () => {
  const answer = await client.chat.completions.create({ ...ASK, chat_template_kwargs: { enable_thinking: true } });
  check(answer.choices[0].message.reasoning_content === THOUGHT, answer);
});

test("tools, run by the package", async () => {
  const tool = { type: "function", function: { name: "weather", parameters, function: weather, parse: JSON.parse } };
  const runner = client.chat.completions.runTools({ ...ASK, tools: [tool] });
  check((await runner.finalContent()) === SENTENCE);
  check(runner.messages.some((message) => message.content === `rain in ${SENTENCE}`), runner.messages);
});

test("parsed answers", async () => {
  const answer = await client.chat.completions.parse({ ...ASK, response_format: zodResponseFormat(City, "city") });
  check(answer.choices[0].message.parsed.name === SENTENCE, answer);
});

test("responses", async () => {
  const answer = await client.responses.create({ model: CHAT, input: "Who sat?" });
  check(answer.output_text === SENTENCE, answer);
});

test("embeddings", async () => {
  const answer = await client.embeddings.create({ model: VECTORS, input: ["a cat", "a dog"] });
  check(answer.data.length === 2 && Math.abs(Math.hypot(...answer.data[0].embedding) - 1) < 1e-4);
});

test("speech and its transcription", async () => {
  const sound = await client.audio.speech.create({
    model: "telephone-speech", input: "one two", voice: "allison", response_format: "wav",
  });
  const file = new File([await sound.arrayBuffer()], "said.wav");
  const heard = await client.audio.transcriptions.create({ model: "telephone-transcriber", file });
  check(typeof heard.text === "string", heard);
});

test("errors", async () => {
  const error = await client.chat.completions.create({ ...ASK, model: "none" }).catch((raised) => raised);
  check(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", error);
});

await run();
