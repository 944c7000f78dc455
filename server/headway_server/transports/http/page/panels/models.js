import { call } from "../api.js";
import { language, problem } from "../controls.js";
import { element, show, written } from "../dom.js";

const STATES = {
  BUNDLE_STATE_LOADING: "loading",
  BUNDLE_STATE_READY: "ready",
  BUNDLE_STATE_UNLOADING: "unloading",
  BUNDLE_STATE_FAILED: "failed",
  BUNDLE_STATE_REJECTED: "rejected",
  BUNDLE_STATE_INCOMPLETE: "incomplete",
  BUNDLE_STATE_AVAILABLE: "not loaded",
};

function variantName(variant) {
  return variant.replace("VARIANT_", "").toLowerCase().replaceAll("_", "-");
}

function taskName(task) {
  return task.replaceAll("_", " ");
}

function languages(one, several) {
  return one ? language(one) : `${several.length} languages`;
}

function quality(model) {
  const best = (model.quality ?? []).find((figure) => figure.variant === model.variant) ?? model.quality?.[0];
  if (!best) return null;
  const value = written(best.value, best.value < 10 ? 3 : 1);
  const data = best.exampleCount > 1 ? `${written(best.exampleCount)} examples of ${best.dataset}` : best.dataset;
  return [`${best.metric.replaceAll("_", " ")} ${value}`, data];
}

function facts(model) {
  const rows = [["Parameters", written(model.parameterCount)], ["Runs as", `${variantName(model.variant)} on ${model.device}`]];
  const figure = quality(model);
  if (figure) rows.push(["Quality", `${figure[0]} (${figure[1]})`]);
  if (model.targetLanguages?.length) {
    const target = languages(model.targetLanguage, model.targetLanguages);
    const reads = model.sourceLanguage || model.sourceLanguages?.length; // what captions an image reads no language
    rows.push(["Languages", reads ? `${languages(model.sourceLanguage, model.sourceLanguages)} to ${target}` : target]);
  }
  if (model.maxInputTokenCount) rows.push(["Longest input", `${written(model.maxInputTokenCount)} tokens`]);
  if (model.labels?.length) {
    const some = model.labels.slice(0, 12).join(", ");
    rows.push([`${model.labels.length} labels`, model.labels.length > 12 ? `${some}, …` : some]);
  }
  if (model.embeddingSpace) rows.push(["Goes with", `models of the space ${model.embeddingSpace}`]);
  if (model.license) rows.push(["Licence", model.license]);
  return element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function card(model, links, unload) {
  return element(
    "li",
    { class: "card" },
    element("h3", {}, model.name, " ", element("small", {}, `version ${model.version}`)),
    element("p", { class: "badges" }, element("span", { class: "badge" }, taskName(model.task)), element("span", { class: "badge ready" }, "ready")),
    element("p", {}, model.description),
    facts(model),
    element(
      "div",
      { class: "row" },
      element("span", { class: "row" }, ...links),
      element("button", { type: "button", onclick: () => unload(model) }, "Unload"),
    ),
  );
}

export const models = {
  id: "models",
  title: "Models",
  lead: "Models of this server, with quality and limits.",
  open(place, served, { linksOf }) {
    const message = element("div", { "aria-live": "polite" });
    const others = element("div");

    async function change(method, { name, version }) {
      if (method === "UnloadModel" && !confirm(`Unload ${name}/${version}? Calls to it are refused until it is loaded again.`)) return;
      show(message);
      try {
        await call("ModelService", method, { model: name, modelVersion: version });
        show(message, element("p", {}, `${name}/${version} was ${method === "LoadModel" ? "loaded" : "unloaded"}.`));
      } catch (error) {
        show(message, problem(error));
      }
    }

    async function look() {
      try {
        const { bundles = [] } = await call("ModelService", "ListBundles", {});
        const rest = bundles.filter((bundle) => bundle.state !== "BUNDLE_STATE_READY");
        if (!rest.length) return;
        show(
          others,
          element("h3", {}, "Also in the store"),
          element(
            "ul",
            { class: "bundles" },
            ...rest.map((bundle) =>
              element(
                "li",
                {},
                element("strong", {}, `${bundle.name}/${bundle.version}`),
                ` ${STATES[bundle.state] ?? bundle.state}`,
                bundle.reason ? `: ${bundle.reason}` : "",
                " ",
                bundle.state === "BUNDLE_STATE_AVAILABLE" && element("button", { type: "button", onclick: () => change("LoadModel", bundle) }, "Load"),
              ),
            ),
          ),
        );
      } catch {
        show(others); // who may not ask for bundles sees the models alone
      }
    }

    place.append(message, element("ul", { class: "cards" }, ...served.map((model) => card(model, linksOf(model), (each) => change("UnloadModel", each)))), others);
    look();
  },
};
