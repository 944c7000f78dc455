import { metrics } from "../api.js";
import { problem } from "../controls.js";
import { drawn, duration, element, repeat, show, written } from "../dom.js";

const EVERY_MS = 2000;
const NUM_POINTS = 60;

/** Excludes the calls by which pages like this one list models. */
const isWork = ({ method = "" }) => !method.startsWith("headway.v1.ModelService/");

function sum(samples, name, fits = () => true) {
  return samples.filter((sample) => sample.name === name && fits(sample.labels)).reduce((total, sample) => total + sample.value, 0);
}

/** Returns a percentile of a histogram between two scrapes, by its buckets' upper bounds. */
function percentile(now, before, name, share) {
  const counts = new Map();
  for (const [samples, sign] of [[now, 1], [before, -1]]) {
    for (const { name: each, labels, value } of samples) {
      if (each !== `${name}_bucket` || !isWork(labels)) continue;
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + sign * value);
    }
  }
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  const total = counts.get(Infinity) ?? 0;
  if (!total) return NaN;
  let below = 0;
  let from = 0;
  for (const bound of bounds) {
    const upTo = counts.get(bound);
    if (upTo >= share * total) {
      if (bound === Infinity) return from;
      return from + ((share * total - below) / Math.max(upTo - below, 1)) * (bound - from);
    }
    [below, from] = [upTo, bound];
  }
  return NaN;
}

function figures(now, before, seconds) {
  const rate = (name, fits) => (sum(now, name, fits) - sum(before, name, fits)) / seconds;
  const items = rate("headway_batch_items_sum");
  const batches = rate("headway_batch_items_count");
  return [
    ["Calls per second", rate("headway_calls_total", isWork), (value) => written(value, 1)],
    ["Errors per second", rate("headway_calls_total", (labels) => labels.code !== "OK" && isWork(labels)), (value) => written(value, 1)],
    ["Median call", percentile(now, before, "headway_call_duration_seconds", 0.5), duration],
    ["99th percentile", percentile(now, before, "headway_call_duration_seconds", 0.99), duration],
    ["Inputs waiting", sum(now, "headway_inputs_waiting"), written],
    ["Inputs per batch", batches ? items / batches : NaN, (value) => (Number.isFinite(value) ? written(value, 1) : "–")],
    ["Tokens per second", rate("headway_output_tokens_total"), written],
    ["Slots in use", sum(now, "headway_slots_used"), (value) => `${written(value)} of ${written(sum(now, "headway_slots"))}`],
    ["Memory", sum(now, "process_resident_memory_bytes") / 2 ** 20, (value) => `${written(value)} MiB`],
  ];
}

function sparkline(values) {
  const most = Math.max(...values.filter(Number.isFinite), 1e-9);
  const points = values
    .map((value, index) => [(index / (NUM_POINTS - 1)) * 100, 30 - (Number.isFinite(value) ? value / most : 0) * 28])
    .map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
  return drawn("svg", { class: "sparkline", viewBox: "0 0 100 32", preserveAspectRatio: "none", "aria-hidden": "true" }, drawn("polyline", { points: points.join(" ") }));
}

export const server = {
  id: "server",
  title: "Server",
  lead: "The server's metrics over the last two minutes.",
  open(place) {
    const board = element("dl", { class: "metrics" });
    const message = element("div", { "aria-live": "polite" });
    const history = new Map();
    let before = null;
    let at = 0;
    place.append(message, board);

    async function look() {
      try {
        const now = await metrics();
        const time = performance.now();
        show(message);
        if (before) {
          const rows = figures(now, before, (time - at) / 1000);
          show(
            board,
            ...rows.map(([name, value, write]) => {
              const values = history.get(name) ?? [];
              values.push(value);
              if (values.length > NUM_POINTS) values.shift();
              history.set(name, values);
              return element("div", {}, element("dt", {}, name), element("dd", {}, write(value)), sparkline(values));
            }),
          );
        } else show(message, element("p", {}, "Measuring …"));
        [before, at] = [now, time];
      } catch (error) {
        show(message, problem(error));
      }
    }

    return { leave: repeat(look, EVERY_MS) };
  },
};
