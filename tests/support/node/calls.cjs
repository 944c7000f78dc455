// Calls a server in every way that a client of gRPC has, and prints what came as one line of JSON.
//
//   NODE_PATH=.../node_modules node calls.cjs ADDRESS PROTO_FOLDER...
"use strict";

const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");
const fs = require("fs");
const path = require("path");

const [address, ...folders] = process.argv.slice(2);
const options = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true, includeDirs: folders };
const load = (...files) => grpc.loadPackageDefinition(protoLoader.loadSync(files, options));

const headway = load(
  "headway/v1/text_classification_service.proto",
  "headway/v1/generation_service.proto",
  "headway/v1/image_classification_service.proto",
  "headway/v1/translation_service.proto",
  "headway/v1/model_service.proto",
).headway.v1;
const inference = load("headway/oip/grpc_predict_v2.proto").inference;

const plain = grpc.credentials.createInsecure();
const texts = new headway.TextClassificationService(address, plain);
const generation = new headway.GenerationService(address, plain);
const tensors = new inference.GRPCInferenceService(address, plain);

// A unary call; resolves with the response, or with the error.
const call = (client, method, request, callOptions = {}) =>
  new Promise((resolve) =>
    client[method](request, new grpc.Metadata(), callOptions, (error, response) => resolve(error ?? response)),
  );

// A call whose answer is a stream; `onMessage` may cancel it. Resolves with the messages and the code it ended with.
const listen = (stream, onMessage = () => {}) =>
  new Promise((resolve) => {
    const messages = [];
    stream.on("data", (message) => {
      messages.push(message);
      onMessage(messages, stream);
    });
    stream.on("error", (error) => resolve({ messages, code: grpc.status[error.code] }));
    stream.on("end", () => resolve({ messages, code: "OK" }));
  });

// The details of an error: google.rpc.Status travels in a trailer, and holds messages of several types.
function detailsOf(error) {
  const root = new protobuf.Root();
  root.resolvePath = (_, target) =>
    folders.map((folder) => path.join(folder, target)).find((file) => fs.existsSync(file)) ?? target;
  root.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"], { keepCase: true });
  const status = root.lookupType("google.rpc.Status").decode(error.metadata.get("grpc-status-details-bin")[0]);
  return status.details.map((detail) => {
    const type = root.lookupType(detail.type_url.split("/").pop());
    return { type: type.name, ...type.toObject(type.decode(detail.value)) };
  });
}

async function unary() {
  const answer = await call(texts, "ClassifyText", { texts: ["goal match", "atom"], model: "topics" });
  return answer.results.map((result) => result.labels[0].label);
}

async function serverStream() {
  const parameters = { max_new_tokens: 20, sampling: { temperature: 1, seed: "7" } };
  const whole = await call(generation, "GenerateText", { prompts: ["the cat"], parameters, model: "tiny-generation" });
  const request = { prompt: "the cat", parameters, model: "tiny-generation" };
  const { messages, code } = await listen(generation.StreamGenerateText(request));
  return {
    code,
    whole: whole.results[0].text,
    streamed: messages.map((message) => message.text_delta).join(""),
    finish_reason: messages.at(-1).result.finish_reason,
  };
}

async function cancel() {
  const request = { prompt: "the cat", parameters: { max_new_tokens: 60 }, model: "tiny-generation" };
  return (await listen(generation.StreamGenerateText(request), (_, stream) => stream.cancel())).code;
}

async function deadline() {
  const request = { prompts: Array(256).fill("the cat"), parameters: { max_new_tokens: 60 }, model: "tiny-generation" };
  const began = Date.now();
  const error = await call(generation, "GenerateText", request, { deadline: Date.now() + 100 });
  return { code: grpc.status[error.code], milliseconds: Date.now() - began };
}

async function errorDetails() {
  const error = await call(texts, "ClassifyText", { texts: ["goal", ""], model: "topics" });
  return { code: grpc.status[error.code], message: error.details, details: detailsOf(error) };
}

async function gzip() {
  const compressing = new headway.TextClassificationService(address, plain, {
    "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip,
  });
  const answer = await call(compressing, "ClassifyText", { texts: [`${"goal ".repeat(30)}`], model: "topics" });
  compressing.close();
  return answer.results.map((result) => result.labels[0].label);
}

const tensor = (...elements) => ({
  name: "text",
  datatype: "BYTES",
  shape: [elements.length],
  contents: { bytes_contents: elements.map((element) => Buffer.from(element)) },
});

async function infer() {
  const request = { model_name: "topics", id: "7", inputs: [tensor("goal", "atom")], outputs: [{ name: "label" }] };
  const answer = await call(tensors, "ModelInfer", request);
  const [labels] = answer.outputs;
  return { id: answer.id, shape: labels.shape, first: labels.contents.bytes_contents[0].toString() };
}

async function bidirectionalStream() {
  const stream = tensors.ModelStreamInfer();
  const parameters = { max_new_tokens: { int64_param: "10" } };
  stream.write({ model_name: "tiny-generation", id: "a", inputs: [tensor("the cat")], parameters });
  stream.write({ model_name: "topics", id: "b", inputs: [tensor("atom")] });
  const isLast = (message) => message.infer_response.parameters.triton_final_response.bool_param;
  const { messages, code } = await listen(stream, (all) => {
    if (all.filter(isLast).length === 2) stream.end();
  });
  return { code, ids: [...new Set(messages.map((message) => message.infer_response.id))].sort() };
}

async function main() {
  const result = {
    deadline: await deadline(), // first: a call that comes behind others may be refused at once
    unary: await unary(),
    server_stream: await serverStream(),
    cancel: await cancel(),
    error_details: await errorDetails(),
    gzip: await gzip(),
    infer: await infer(),
    bidirectional_stream: await bidirectionalStream(),
  };
  for (const client of [texts, generation, tensors]) client.close();
  console.log(JSON.stringify(result));
}

main();
