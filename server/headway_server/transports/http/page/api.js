// Calls of the server's API by the Connect protocol (connectrpc.com/docs/protocol), in JSON.

const KEY = "headway-api-key";
const IN_TRAILER = 2; // a flag of an envelope: it ends the stream
const HEADER_BYTES = 5; // of an envelope: its flags and the length of its message

/** Failure of a call, by the server or the network. */
export class CallError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** Address of the server. */
export const address = new URL(".", document.baseURI);

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

function headers(contentType) {
  const all = { "content-type": contentType, "connect-protocol-version": "1" };
  if (key.get()) all.authorization = `Bearer ${key.get()}`;
  return all;
}

async function send(service, method, contentType, body, signal) {
  const path = new URL(`headway.v1.${service}/${method}`, address);
  try {
    return await fetch(path, { method: "POST", headers: headers(contentType), body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("unavailable", "The server does not answer. Is it running?");
  }
}

async function failure(response) {
  try {
    const { code, message } = await response.json();
    return new CallError(code ?? "unknown", message || `The server answered ${response.status}.`);
  } catch {
    return new CallError("unknown", `The server answered ${response.status} ${response.statusText}.`);
  }
}

/** Makes a call and returns its answer. Throws CallError; an AbortError if `signal` ended it. */
export async function call(service, method, request, { signal } = {}) {
  const response = await send(service, method, "application/json", JSON.stringify(request), signal);
  if (!response.ok) throw await failure(response);
  return response.json();
}

function envelope(message) {
  const data = new TextEncoder().encode(JSON.stringify(message));
  const bytes = new Uint8Array(HEADER_BYTES + data.length);
  new DataView(bytes.buffer).setUint32(1, data.length);
  bytes.set(data, HEADER_BYTES);
  return bytes;
}

/** Makes a call and yields the messages of its answer as they arrive. Errors are those of `call`. */
export async function* stream(service, method, request, { signal } = {}) {
  const response = await send(service, method, "application/connect+json", envelope(request), signal);
  if (!response.ok) throw await failure(response);
  const reader = response.body.getReader();
  let held = new Uint8Array(0);
  try {
    for (;;) {
      while (held.length >= HEADER_BYTES) {
        const end = HEADER_BYTES + new DataView(held.buffer, held.byteOffset).getUint32(1);
        if (held.length < end) break;
        const message = JSON.parse(new TextDecoder().decode(held.subarray(HEADER_BYTES, end)));
        const isTrailer = held[0] & IN_TRAILER;
        held = held.slice(end);
        if (!isTrailer) yield message;
        else if (message.error) throw new CallError(message.error.code, message.error.message);
        else return;
      }
      const { done, value } = await reader.read();
      if (done) throw new CallError("unavailable", "The server ended the answer early.");
      const joined = new Uint8Array(held.length + value.length);
      joined.set(held);
      joined.set(value, held.length);
      held = joined;
    }
  } catch (error) {
    if (error instanceof CallError || error.name === "AbortError") throw error;
    throw new CallError("unavailable", "The connection broke before the end of the answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Returns the server's metrics, as Prometheus reads them: a list of {name, labels, value}. */
export async function metrics({ signal } = {}) {
  let response;
  try {
    response = await fetch(new URL("metrics", address), { signal, headers: key.get() ? { authorization: `Bearer ${key.get()}` } : {} });
  } catch {
    throw new CallError("unavailable", "The server does not answer. Is it running?");
  }
  if (!response.ok) throw await failure(response);
  return parsed(await response.text());
}

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function parsed(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, "$1");
    samples.push({ name: found[1], labels, value: found[3] === "+Inf" ? Infinity : Number(found[3]) });
  }
  return samples;
}
