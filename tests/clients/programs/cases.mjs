// What the programs in JavaScript share: as cases.py.

export const HTTP = process.env.HEADWAY_HTTP;
export const GRPC = process.env.HEADWAY_GRPC;
export const BASE = `${HTTP}/v1`;
export const [CHAT, VECTORS, SCORER] = ["chat", "clip-text", "scorer"];
export const [SENTENCE, THOUGHT] = ["The cat sat", "Hello there"];

const cases = [];

export function check(holds, what) {
  if (!holds) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

export function test(name, run, { fails = "" } = {}) {
  cases.push({ name, run, fails });
}

export async function run() {
  for (const { name, run, fails } of cases) {
    let detail = "";
    try {
      await run();
    } catch (error) {
      console.error(error);
      detail = `${error?.name ?? "Error"}: ${error?.message ?? error}`.slice(0, 2000);
    }
    process.stdout.write(`${JSON.stringify({ case: name, ok: !detail, detail, fails })}\n`);
  }
  process.exit(0);
}
