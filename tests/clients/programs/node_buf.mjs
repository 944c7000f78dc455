// buf curl: gRPC, gRPC-Web and Connect.
// npm: @bufbuild/buf@1.75.0

import { execFileSync } from "node:child_process";

import { GRPC, HTTP, check, run, test } from "./cases.mjs";

const text = JSON.stringify({ model: "ag-news", texts: ["Oil prices fall as the storm weakens"] });
const prompt = JSON.stringify({ model: "shakespeare", prompt: "ROMEO:", parameters: { maxNewTokens: 20 } });
const buf = (address, protocol, body, method) => {
  const schema = protocol === "grpc" ? ["--http2-prior-knowledge"] : ["--schema", process.env.HEADWAY_PROTO];
  const command = ["curl", "--protocol", protocol, ...schema, "--data", body, `${address}/headway.v1.${method}`];
  return execFileSync("../node_modules/.bin/buf", command, { encoding: "utf8", timeout: 60_000 });
};
const tryAll = (address, protocol) => {
  const answer = JSON.parse(buf(address, protocol, text, "TextClassificationService/ClassifyText"));
  check(answer.results[0].labels.length > 0, answer);
  check(buf(address, protocol, prompt, "GenerationService/StreamGenerateText").includes("textDelta"));
};

test("gRPC, by reflection", async () => tryAll(`http://${GRPC}`, "grpc"));

test("Connect", async () => tryAll(HTTP, "connect"));

test("gRPC-Web", async () => tryAll(HTTP, "grpcweb"), { fails: "the HTTP port does not speak it" });

await run();
