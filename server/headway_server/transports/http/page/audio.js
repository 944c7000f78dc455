// Audio as the API takes it: what the browser can decode or record becomes a WAV file.

import { CallError } from "./api.js";

const RATE = 16000; // samples a second; the server brings it to its model's
const HEADER_BYTES = 44;

/** Returns a recording or a file of audio as a WAV file of 16 bits, mono. Throws CallError if the browser cannot decode it. */
export async function wav(blob) {
  const context = new AudioContext({ sampleRate: RATE });
  try {
    const audio = await context.decodeAudioData(await blob.arrayBuffer());
    const channels = Array.from({ length: audio.numberOfChannels }, (_, number) => audio.getChannelData(number));
    return encoded(audio.length, (place) => channels.reduce((sum, channel) => sum + channel[place], 0) / channels.length);
  } catch {
    throw new CallError("invalid_argument", "The browser cannot decode this as audio.");
  } finally {
    context.close();
  }
}

function encoded(length, sample) {
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + 2 * length));
  const name = (place, text) => [...text].forEach((letter, index) => view.setUint8(place + index, letter.charCodeAt(0)));
  name(0, "RIFF");
  view.setUint32(4, HEADER_BYTES - 8 + 2 * length, true);
  name(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // whole numbers
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true); // bytes a second
  view.setUint16(32, 2, true); // bytes of a frame
  view.setUint16(34, 16, true); // bits of a sample
  name(36, "data");
  view.setUint32(40, 2 * length, true);
  for (let place = 0; place < length; place += 1) {
    view.setInt16(HEADER_BYTES + 2 * place, 32767 * Math.min(1, Math.max(-1, sample(place))), true);
  }
  return new Blob([view.buffer], { type: "audio/wav" });
}

/** Records from the microphone until `stop()`, which returns what was recorded. Throws CallError where it may not. */
export async function record() {
  if (!navigator.mediaDevices) {
    throw new CallError("failed_precondition", "A browser records on pages of HTTPS or of this machine alone.");
  }
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch (error) {
    throw new CallError("failed_precondition", `The browser does not record: ${error.message}`);
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
