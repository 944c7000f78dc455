// Audio of the API: decodable or recorded audio becomes a WAV file, and samples are played as they arrive.

import { CallError } from "./api.js";

const RATE = 16000; // samples a second; the server brings it to its model's
const HEADER_BYTES = 44;
const LEAD_S = 0.1; // of silence before what is played, so that what comes next comes in time

/** Returns a recording or a file of audio as a WAV file of 16 bits, mono. Throws CallError if the browser cannot decode it. */
export async function wav(blob) {
  const context = new AudioContext({ sampleRate: RATE });
  try {
    const audio = await context.decodeAudioData(await blob.arrayBuffer());
    const channels = Array.from({ length: audio.numberOfChannels }, (_, number) => audio.getChannelData(number));
    const mean = (place) => channels.reduce((sum, channel) => sum + channel[place], 0) / channels.length;
    return wavOf([Int16Array.from({ length: audio.length }, (_, place) => 32767 * Math.min(1, Math.max(-1, mean(place))))], RATE);
  } catch {
    throw new CallError("invalid_argument", "The browser cannot decode this as audio.");
  } finally {
    context.close();
  }
}

/** Returns samples, a list of Int16Array, as a WAV file, mono. */
export function wavOf(parts, rate) {
  const view = new DataView(new ArrayBuffer(HEADER_BYTES));
  const length = parts.reduce((sum, part) => sum + part.byteLength, 0);
  const name = (place, text) => [...text].forEach((letter, index) => view.setUint8(place + index, letter.charCodeAt(0)));
  name(0, "RIFF");
  view.setUint32(4, HEADER_BYTES - 8 + length, true);
  name(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // whole numbers
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true); // bytes a second
  view.setUint16(32, 2, true); // bytes of a frame
  view.setUint16(34, 16, true); // bits of a sample
  name(36, "data");
  view.setUint32(40, length, true);
  return new Blob([view.buffer, ...parts], { type: "audio/wav" }); // every browser's machine is little-endian, as WAV is
}

/** Plays samples, Int16Array after Int16Array, as they arrive. */
export function player(rate) {
  const context = new AudioContext({ sampleRate: rate });
  let end = 0; // of what has come, by the context's clock
  return {
    add(samples) {
      const buffer = context.createBuffer(1, samples.length, rate);
      buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
      const source = new AudioBufferSourceNode(context, { buffer });
      source.connect(context.destination);
      if (end <= context.currentTime) end = context.currentTime + LEAD_S; // the first, or late
      source.start(end);
      end += buffer.duration;
    },
    /** Returns when all has been played; throws an AbortError if `signal` ends it. */
    async ended(signal) {
      signal.throwIfAborted(); // the last messages may have been read before
      await new Promise((done, fail) => {
        setTimeout(done, 1000 * (end - context.currentTime + LEAD_S));
        signal.addEventListener("abort", () => fail(signal.reason), { once: true });
      });
    },
    close: () => context.close(),
  };
}

/** Records from the microphone until `stop()`, which returns the recording. Throws CallError without permission. */
export async function record() {
  if (!navigator.mediaDevices) {
    throw new CallError("failed_precondition", "Browsers record only on HTTPS pages and on localhost.");
  }
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch (error) {
    throw new CallError("failed_precondition", `The browser cannot record: ${error.message}`);
  }
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  recorder.start();
  const stopped = new Promise((resolve) => recorder.addEventListener("stop", () => resolve(new Blob(parts, { type: recorder.mimeType })), { once: true }));
  return {
    stop() {
      if (recorder.state !== "inactive") recorder.stop();
      for (const track of stream.getTracks()) track.stop();
      return stopped;
    },
  };
}
