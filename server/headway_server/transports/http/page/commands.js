// The call of a panel as commands of other programs.

import { address, key } from "./api.js";
import { copied, element, newId } from "./dom.js";

const GRPC = `${address.hostname}:${document.querySelector('meta[name="grpc-port"]').content}`;
const IS_ENCRYPTED = address.protocol === "https:";
const FILES = new Map(Object.entries({ image: "picture.png", images: "picture.png", mask: "mask.png", audios: "audio.wav", frames: "frame.png" }));

/** A file in place of its contents. */
class Named {
  constructor(name) {
    this.name = name;
  }
}

/** Returns a message with files in place of their contents. */
function filed(value, file) {
  if (typeof value === "string") return file ? new Named(file) : value;
  if (Array.isArray(value)) return value.map((each, index) => filed(each, value.length > 1 ? file?.replace(".", `-${index + 1}.`) : file));
  if (!value || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, filed(each, FILES.get(name))]));
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

function hasFiles(value) {
  return value instanceof Named || (value !== null && typeof value === "object" && Object.values(value).some(hasFiles));
}

/** Returns a message as JSON in a here-document, where the shell reads the files. */
function expanded(value) {
  if (value instanceof Named) return `"$(base64 < ${value.name} | tr -d '\\n')"`;
  if (Array.isArray(value)) return `[${value.map(expanded).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value).replaceAll(/[\\$`]/g, "\\$&");
  const given = Object.entries(value).filter(([, each]) => each !== undefined);
  return `{${given.map(([name, each]) => `${expanded(name)}:${expanded(each)}`).join(",")}}`;
}

/** Returns a message as an argument of a shell's command, and what follows the command: `input`, if it has files. */
function argument(message, input) {
  const content = filed(message);
  return hasFiles(content) ? [input, ` <<END\n${expanded(content)}\nEND`] : [quoted(JSON.stringify(message)), ""];
}

function curl({ service, method, request, whole }) {
  const headers = "-H 'content-type: application/json'" + (key.get() ? ' -H "authorization: Bearer $HEADWAY_API_KEY"' : "");
  const [body, input] = argument(whole ?? request, "@-");
  const path = `headway.v1.${service}/${method.replace(/^Stream/, "")}`;
  return `${whole ? "# the same call without a stream\n" : ""}curl -s ${headers} \\\n  -d ${body} \\\n  ${address}${path}${input}`;
}

function grpcurl({ service, method, request }) {
  const [body, input] = argument(request, "@");
  const options = (IS_ENCRYPTED ? "" : "-plaintext ") + (key.get() ? '-H "x-api-key: $HEADWAY_API_KEY" ' : "");
  return `grpcurl ${options}-d ${body} \\\n  ${GRPC} headway.v1.${service}/${method}${input}`;
}

/** A text of Python that is not a literal. */
class Code {
  constructor(text) {
    this.text = text;
  }
}

function literal(value) {
  if (value instanceof Code) return value.text;
  if (value instanceof Named) return literal(value.name);
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "boolean") return value ? "True" : "False";
  if (value && typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${literal(name)}: ${literal(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

function snake(name) {
  return name.replaceAll(/(?<!^)([A-Z])/g, "_$1").toLowerCase();
}

function isGiven(value) {
  return value !== undefined && value !== "" && value !== false && !(Array.isArray(value) && !value.length) && !/_UNSPECIFIED$/.test(value);
}

/** Writes an argument; one that has no name of Python's stands in a dictionary. */
function argumentOf(name, value) {
  return /^[A-Za-z_]\w*$/.test(name) ? `${name}=${literal(value)}` : `**{${literal(name)}: ${literal(value)}}`;
}

/** Writes a call of a function, with an argument per line if they are many. */
function written(name, positional, options) {
  const given = Object.entries(options).filter(([, value]) => isGiven(value));
  const all = [...positional.map(literal), ...given.map(([option, value]) => argumentOf(option, value))];
  const line = all.join(", ");
  return line.length + name.length <= 90 ? `${name}(${line})` : `${name}(\n${all.map((each) => `    ${each},\n`).join("")})`;
}

function only(list) {
  return list.length === 1 ? list[0] : list;
}

/** Values of the protocol as the client has them. */
const CONVERTED = {
  seed: (value) => new Code(String(/^\d+$/.test(value) ? BigInt(value) : Number(value))), // 64 bits, a text in JSON
  sampler: (value) => value.replace("DIFFUSION_SAMPLER_", "").toLowerCase(),
  attention: ({ summary }) => (isGiven(summary) ? summary.replace("ATTENTION_SUMMARY_", "").toLowerCase() : undefined),
  logProbabilities: ({ topTokenCount }) => topTokenCount,
  pages: (pages) => only(pages.map((page) => new Code(written("Page", [], page)))),
  phraseConstraints: (all) => only(all.map((each) => new Code(written("PhraseConstraints", [], each)))),
  prompts: (all) => only(all.map((each) => (each.points ? new Code(segmentPrompt(each)) : each))),
  conversations: (all) => only(all.map(({ messages }) => messages.map(turn))),
};
const RENAMED = { attention: "summary" };
const POSITIONAL = {
  AnswerQuestion: ["questions", "contexts"],
  GenerateText: ["prompts", "conversations"],
  GenerateImage: ["prompt"],
  InspectText: ["text"],
  InspectGeneration: ["text"],
  InspectTranslation: ["text"],
  InspectImage: ["image"],
  SegmentImage: ["image"],
};
const ALL_POSITIONAL = ["texts", "images", "audios", "frames"];
const PRINTED = {
  GenerateImage: 'Path("drawing.png").write_bytes(answer[0].png)',
  SynthesizeSpeech: 'Path("speech.wav").write_bytes(answer[0].audio)',
};
const TEXTS = ["GenerateText", "TranslateText", "RewriteText", "CaptionImage", "TranscribeSpeech"];

function segmentPrompt({ points, box }) {
  const places = (isOutside) => points.filter(({ outside = false }) => outside === isOutside).map(({ x, y }) => new Code(`(${x}, ${y})`));
  const sides = box && new Code(`(${[box.left, box.top, box.right, box.bottom].join(", ")})`);
  return written("SegmentPrompt", [], { points: places(false), outside_points: places(true), box: sides });
}

function turn({ role, content, parts, reasoning }) {
  const said = parts ? parts.map(({ image, text }) => (image ? new Code(`Picture(${literal(image)})`) : text)) : content;
  return { role: role.replace("ROLE_", "").toLowerCase(), content: said, ...(reasoning && { reasoning }) };
}

/** Returns the fields of a request with those of its parameters. */
function flat({ parameters = {}, ...fields }) {
  const { sampling = {}, constraint = {}, ...others } = parameters;
  const { choices, ...form } = constraint;
  return { ...fields, ...others, ...sampling, ...form, choices: choices?.texts };
}

function python({ method, request, whole }) {
  const kind = method.replace(/^Stream/, "");
  const fields = Object.entries(flat(filed(whole ?? request))).filter(([, value]) => isGiven(value));
  const order = POSITIONAL[kind] ?? ALL_POSITIONAL;
  const converted = fields.map(([name, value]) => [name, CONVERTED[name] ? CONVERTED[name](value) : order.includes(name) ? only(value) : value]);
  const positional = converted.filter(([name]) => order.includes(name)).sort(([one], [other]) => order.indexOf(one) - order.indexOf(other)).map(([, value]) => value);
  const options = Object.fromEntries(converted.filter(([name]) => !order.includes(name)).map(([name, value]) => [snake(RENAMED[name] ?? name), value]));
  const name = fields.some(([each]) => each === "conversations") ? "chat" : snake(kind);
  const call = written(`answer = client.${name}`, positional, options).replaceAll("\n", "\n    ");
  const print = PRINTED[kind] ?? (TEXTS.includes(kind) ? "print(answer[0].text)" : "for result in answer:\n    print(result)");
  const names = ["Client", ...["Page", "PhraseConstraints", "Picture", "SegmentPrompt"].filter((each) => call.includes(`${each}(`))];
  return [
    ...(key.get() ? ["# reads the key from HEADWAY_API_KEY"] : []),
    ...(print.startsWith("Path") ? ["from pathlib import Path", ""] : []),
    `from headway_client import ${names.join(", ")}`,
    "",
    `with Client("${GRPC}"${IS_ENCRYPTED ? ", tls=True" : ""}) as client:`,
    `    ${call}`,
    print,
  ].join("\n");
}

function opened(file) {
  return new Code(`open(${literal(file)}, "rb")`);
}

/** The calls that OpenAI's API has too: [function, its own arguments, further ones, what is done with the answer]. */
const OPENAI = {
  GenerateText({ prompts, conversations, ...given }) {
    const { maxNewTokens, temperature, topP, topK, minP, seed, repetitionPenalty, presencePenalty, frequencyPenalty, stopStrings, jsonSchema, regex, choices } = given;
    const common = { max_tokens: maxNewTokens, temperature, top_p: topP, seed: seed && CONVERTED.seed(seed), presence_penalty: presencePenalty, frequency_penalty: frequencyPenalty, stop: stopStrings };
    const more = { top_k: topK, min_p: minP, repetition_penalty: repetitionPenalty, guided_json: jsonSchema, guided_regex: regex, guided_choice: choices };
    if (!conversations) return ["completions.create", { prompt: prompts[0], ...common }, more, "print(answer.choices[0].text)"];
    const part = ({ image, text }) => (image ? { type: "image_url", image_url: { url: "data:image/png;base64,..." } } : { type: "text", text });
    const messages = conversations[0].messages.map(({ role, content, parts }) => ({ role: role.replace("ROLE_", "").toLowerCase(), content: parts?.map(part) ?? content }));
    return ["chat.completions.create", { messages, ...common }, more, "print(answer.choices[0].message.content)"];
  },
  EmbedText: ({ texts }) => ["embeddings.create", { input: texts }, {}, "print([each.embedding for each in answer.data])"],
  GenerateImage({ prompt = "", imageCount, image, mask, negativePrompt, stepCount, guidanceScale, sampler, seed, strength }) {
    const own = { prompt, n: imageCount, image: image && opened(image), mask: mask && opened(mask) };
    const named = sampler && isGiven(sampler) ? CONVERTED.sampler(sampler) : undefined;
    const more = { negative_prompt: negativePrompt, step_count: stepCount, guidance_scale: guidanceScale, sampler: named, seed: seed && CONVERTED.seed(seed), strength };
    return [image ? "images.edit" : "images.generate", own, more, 'Path("drawing.png").write_bytes(b64decode(answer.data[0].b64_json))'];
  },
  SynthesizeSpeech({ texts, voice, temperature, topK, topP, minP, seed, maxDurationSeconds }) {
    const more = { temperature, top_k: topK, top_p: topP, min_p: minP, seed: seed && CONVERTED.seed(seed), max_duration_seconds: maxDurationSeconds };
    return ["audio.speech.create", { input: texts[0], voice: voice ?? new Code('""'), response_format: "wav" }, more, 'answer.write_to_file("speech.wav")'];
  },
  TranscribeSpeech: ({ audios, language }) => ["audio.transcriptions.create", { file: opened(audios[0]), language }, {}, "print(answer.text)"],
};

function openai({ method, request, whole }) {
  const message = filed(whole ?? request);
  const [name, own, more, print] = OPENAI[method.replace(/^Stream/, "")](flat(message));
  const extra = Object.fromEntries(Object.entries(more).filter(([, value]) => isGiven(value)));
  const options = { model: message.model, ...own, extra_body: Object.keys(extra).length ? extra : undefined };
  return [
    ...(key.get() ? ["import os"] : []),
    ...(print.includes("b64decode") ? ["from base64 import b64decode", "from pathlib import Path"] : []),
    ...(key.get() || print.includes("b64decode") ? [""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${address}v1", api_key=${key.get() ? 'os.environ["HEADWAY_API_KEY"]' : '"none"'})`,
    written(`answer = client.${name}`, [], options),
    print,
  ].join("\n");
}

/** Shows a call {service, method, request} as commands to copy; a streaming call has its unary request as `whole`. */
export function commands(call, title = "The call of this panel") {
  const hasOpenai = call.method.replace(/^Stream/, "") in OPENAI;
  const kinds = [["curl", curl], ["Python", python], ...(hasOpenai ? [["OpenAI", openai]] : []), ["gRPC", grpcurl]];
  const code = element("code");
  const box = element("pre", { tabindex: "0", "aria-label": "The call as a command" }, code);
  const name = newId("commands");
  const choose = (write) => {
    code.textContent = write(call);
  };
  choose(curl);
  const tabs = kinds.map(([label, write], index) =>
    element(
      "label",
      {},
      element("input", { type: "radio", name, checked: index === 0, onchange: () => choose(write) }),
      ` ${label}`,
    ),
  );
  const copy = element(
    "button",
    {
      type: "button",
      onclick: async () => {
        copy.textContent = await copied(code.textContent).then(
          () => "Copied",
          () => "Select the text and copy it",
        );
        setTimeout(() => {
          copy.textContent = "Copy";
        }, 1500);
      },
    },
    "Copy",
  );
  return element(
    "details",
    { class: "commands" },
    element("summary", {}, title),
    element("fieldset", { class: "row" }, element("legend", { class: "spoken" }, "As"), ...tabs, copy),
    box,
  );
}
