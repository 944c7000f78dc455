import { CallError, stream } from "../api.js";
import { addressed, caller, check, choice, chosen, expect, field, modelChoice, modelField, number, sampling, textArea } from "../controls.js";
import { element, enter, listOf, refill, show, steppable, written } from "../dom.js";
import { base64, give } from "../images.js";
import { looked } from "../viewer.js";

const EXAMPLE = "ROMEO:\n";
const MESSAGE = "Who is there?";
const NUM_ALTERNATIVES = 5;
const ENDS = {
  FINISH_REASON_END_OF_SEQUENCE: "end of sequence",
  FINISH_REASON_STOP: "stop string",
  FINISH_REASON_LENGTH: "length limit reached",
  FINISH_REASON_CONSTRAINT: "constraint complete",
};

/** A token that shows its alternatives on hover or focus. */
function token({ text = "", logProbability = 0, topTokens = [] }) {
  const probability = Math.exp(logProbability);
  const rows = topTokens.map((each) =>
    element("tr", { class: each.text === text ? "taken" : null }, element("td", {}, visible(each.text ?? "")), element("td", {}, percent(each.logProbability ?? 0))),
  );
  const card = element("span", { class: "alternatives", role: "tooltip" }, element("table", {}, ...rows));
  const label = `${visible(text)}, ${percent(logProbability)}`;
  return element("span", { class: `token heat${Math.round((1 - probability) * 9)}`, role: "note", tabindex: "-1", "aria-label": label }, text, card);
}

function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "∅";
}

function percent(logProbability) {
  return `${(Math.exp(logProbability) * 100).toFixed(1)} %`;
}

function constraint(kind, value) {
  if (kind === "none" || !value.trim()) return undefined;
  if (kind === "choices") return { choices: { texts: value.split("\n").filter((line) => line.trim()) } };
  return kind === "json" ? { jsonSchema: value } : { regex: value };
}

/** A turn of the reader's: texts and pictures. */
function asked(content, parts = []) {
  const images = parts.filter((part) => part.image).map(({ image }, at) => element("img", { src: `data:;base64,${image}`, alt: `Picture ${at + 1}` }));
  return element("p", { class: "turn user" }, images.length ? element("span", { class: "thumbnails" }, ...images) : "", content ?? parts.at(-1)?.text ?? "");
}

export const generate = {
  id: "generate",
  title: "Generate and chat",
  tab: "Generate",
  lead: "Text as the model generates it, with the probability of each token.",
  capabilities: ["generate_text"],
  open(place, served) {
    const turns = [];
    const said = element("input", { type: "hidden", name: "turns", onchange: () => recall() }); // the turns, to be kept
    const model = modelChoice(served, () => fit());
    const isChat = check("As a chat", false, () => fit());
    const prompt = textArea(EXAMPLE, 5);
    const system = element("input", { type: "text", autocomplete: "off" });
    const maxTokens = number({ min: 1, max: 4096, step: 1, value: 120 });
    const sampled = sampling();
    const penalty = number({ min: 0.01, max: 100, step: 0.05 });
    const presence = number({ min: -2, max: 2, step: 0.1 });
    const frequency = number({ min: -2, max: 2, step: 0.1 });
    const stops = textArea("", 2);
    const kind = choice([["none", "None"], ["json", "JSON schema"], ["regex", "Regular expression"], ["choices", "One of several texts"]]);
    const pattern = textArea("", 3, { spellcheck: "false" });
    const coloured = check("Colour tokens by probability", true, () => form.output.classList.toggle("plain-text", !coloured.box.checked));
    const systemField = field("System message", system);
    const picture = element("input", { type: "file", accept: "image/*", multiple: true });
    const pictureField = field("Pictures", picture, "Before the message; JPEG, PNG, WebP, BMP or GIF");
    const again = element(
      "button",
      {
        type: "button",
        onclick: () => {
          turns.length = 0;
          enter(said, "");
          form.clear();
        },
      },
      "New chat",
    );
    const promptLabel = field("Prompt", prompt, "Ctrl+Enter sends.");

    function fit() {
      const model_ = chosen(model, served);
      const defaults = model_.defaultParameters ?? {};
      sampled.expect(defaults.sampling);
      for (const [input, value] of [[penalty, defaults.repetitionPenalty ?? 1], [presence, 0], [frequency, 0]]) expect(input, value);
      isChat.hidden = !model_.capabilities.includes("chat");
      if (isChat.hidden) isChat.box.checked = false;
      const chats = isChat.box.checked;
      systemField.hidden = !chats;
      pictureField.hidden = !chats || !model_.capabilities.includes("read_image");
      again.hidden = !chats;
      promptLabel.querySelector("label").textContent = chats ? "Message" : "Prompt";
    }

    /** Shows the turns that were kept before a reload. */
    function recall() {
      turns.push(...listOf(said.value).filter((one) => one?.role));
      show(form.output, ...turns.map(({ role, content, parts = [] }) => (role === "ROLE_USER" ? asked(content, parts) : element("p", { class: "turn assistant" }, content))));
    }

    function parameters() {
      return {
        maxNewTokens: maxTokens.given(),
        sampling: sampled.given(),
        repetitionPenalty: penalty.given(),
        presencePenalty: presence.given(),
        frequencyPenalty: frequency.given(),
        stopStrings: stops.value.split("\n").filter(Boolean),
        constraint: constraint(kind.value, pattern.value),
      };
    }

    const form = caller({
      isLive: true,
      fields: [
        modelField(model),
        isChat,
        systemField,
        pictureField,
        promptLabel,
        element("div", { class: "grid" }, field("Length limit", maxTokens, "Tokens"), sampled.temperature),
        element(
          "details",
          {},
          element("summary", {}, "All parameters"),
          element(
            "div",
            { class: "grid" },
            ...sampled.others,
            field("Repetition penalty", penalty),
            field("Presence penalty", presence),
            field("Frequency penalty", frequency),
            sampled.seed,
          ),
          field("Stop strings", stops, "One per line"),
          field("Constraint", kind, "Required form of the text"),
          field("Schema, expression or texts", pattern, "Texts one per line"),
        ),
        coloured,
        again,
        said,
      ],
      label: "Generate",
      example: () => refill(prompt, isChat.box.checked ? MESSAGE : EXAMPLE),
      async prepare() {
        const common = { ...addressed(model, served), parameters: parameters(), logProbabilities: { topTokenCount: NUM_ALTERNATIVES } };
        const call = { service: "GenerationService", method: "StreamGenerateText" };
        if (!isChat.box.checked) return { ...call, request: { ...common, prompt: prompt.value }, whole: { ...common, prompts: [prompt.value] } };
        if (!prompt.value.trim()) throw new CallError("invalid_argument", "Write a message first.");
        const files = pictureField.hidden ? [] : [...picture.files];
        const images = await Promise.all(files.map(async (file) => ({ image: await base64(file) })));
        const said = images.length ? { parts: [...images, { text: prompt.value }] } : { content: prompt.value };
        const message = { role: "ROLE_USER", ...said };
        const first = system.value ? [{ role: "ROLE_SYSTEM", content: system.value }] : [];
        const conversation = { messages: [...first, ...turns, message] };
        return { ...call, request: { ...common, conversation }, whole: { ...common, conversations: [conversation] } };
      },
      async run(prepared, signal, output) {
        const { conversation, prompt: start = "" } = prepared.request;
        const model_ = chosen(model, served);
        const text = element("span", { class: "text" });
        const tokens = steppable(element("span", { class: "tokens", role: "group", "aria-label": "Tokens" }));
        const note = element("p", { class: "timings" }, "waiting for the first token …");
        const thought = element("p", {});
        const thinking = element("details", { hidden: true }, element("summary", {}, "Thinking"), thought);
        const message_ = conversation?.messages.at(-1);
        const written_ = element("p", { class: conversation ? "turn assistant" : "generated" }, element("span", { class: "given" }, start), text, tokens);
        const question = message_ ? asked(message_.content, message_.parts) : null;
        if (conversation && turns.length) output.append(question, thinking, written_, note);
        else show(output, question, thinking, written_, note);
        const began = performance.now();
        let firstAt = 0;
        let count = 0;
        let whole = "";
        const pace = () => {
          const rate = count > 1 ? `, ${written((count - 1) / ((performance.now() - firstAt) / 1000))} tokens per second` : "";
          return `first token after ${written(firstAt - began)} ms, ${written(count)} tokens${rate}`;
        };
        try {
          for await (const message of stream(prepared.service, prepared.method, prepared.request, { signal })) {
            firstAt ||= performance.now();
            count = message.newTokenCount ?? message.result?.newTokenCount ?? count;
            whole += message.textDelta ?? "";
            text.textContent = whole;
            thought.textContent += message.reasoningDelta ?? "";
            thinking.hidden = !thought.textContent;
            tokens.append(...(message.tokens ?? []).map(token));
            tokens.firstElementChild?.setAttribute("tabindex", "0");
            note.textContent = pace();
            if (message.result) note.textContent += `; ${ENDS[message.result.finishReason] ?? "ended"}; seed ${message.result.seed ?? "–"}`;
          }
        } catch (error) {
          note.textContent = error.name === "AbortError" ? `${firstAt ? pace() : "no token"}; stopped` : "";
          throw error;
        }
        if (conversation) {
          turns.push(message_, { role: "ROLE_ASSISTANT", content: whole, reasoning: thought.textContent });
          enter(said, JSON.stringify(turns));
          enter(prompt, "");
          give(picture, []);
        } else if (whole) output.append(looked(model_, { text: start + whole, truncate: true }));
      },
    });
    fit();
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
