// Continue's command, with one message.
// npm: @continuedev/cli@1.5.47

import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";

import { BASE, CHAT, SENTENCE, check, run, test } from "./cases.mjs";

// The configuration of docs/http.md, as JSON, which is YAML.
const model = { name: "headway", provider: "openai", model: CHAT, apiBase: BASE, apiKey: "none", capabilities: ["tool_use"] };
writeFileSync("config.yaml", JSON.stringify({ name: "local", version: "1.0.0", schema: "v1", models: [model] }));

test("a message, after a call of one of its tools", async () => {
  const options = { encoding: "utf8", timeout: 120_000, stdio: ["ignore", "pipe", "inherit"] };
  const excluded = ["--exclude", "AskQuestion", "--exclude", "Bash"]; // the first waits for a person
  const command = ["--config", "config.yaml", ...excluded, "--print", "Who sat?"];
  const answer = execFileSync("../node_modules/.bin/cn", command, options);
  check(answer.includes(SENTENCE), answer);
});

await run();
