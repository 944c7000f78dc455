// Examples of files, made in the browser, so that the page carries no pictures.

import { wavOf } from "./audio.js";
import { element } from "./dom.js";

function drawing(name, width, height, paint) {
  const canvas = element("canvas", { width, height });
  paint(canvas.getContext("2d"));
  return new Promise((resolve) => {
    canvas.toBlob((blob) => resolve(new File([blob], name, { type: "image/png" })));
  });
}

function shape(context, colour, points) {
  context.fillStyle = colour;
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.fill();
}

function shade(context, top, height, from, to) {
  const colour = context.createLinearGradient(0, top, 0, top + height);
  colour.addColorStop(0, from);
  colour.addColorStop(1, to);
  context.fillStyle = colour;
  context.fillRect(0, top, context.canvas.width, height);
}

/** A freighter on the sea. */
export function ship() {
  return drawing("ship.png", 256, 256, (context) => {
    shade(context, 0, 160, "#96bee1", "#cddee8");
    shade(context, 156, 100, "#345c80", "#1c3a5c");
    shape(context, "#302e3a", [[16, 140], [240, 136], [216, 180], [40, 180]]);
    shape(context, "#8c2c26", [[24, 164], [226, 164], [216, 180], [40, 180]]);
    shape(context, "#ececE6", [[40, 92], [94, 92], [94, 140], [40, 140]]);
    shape(context, "#e0e0dc", [[48, 72], [82, 72], [82, 94], [48, 94]]);
    shape(context, "#be4630", [[58, 48], [76, 48], [76, 74], [58, 74]]);
    for (const [left, colour] of [[108, "#b05434"], [140, "#46688c"], [172, "#aa965a"]]) {
      shape(context, colour, [[left, 114], [left + 28, 114], [left + 28, 138], [left, 138]]);
    }
  });
}

/** A star and a balloon in the sky; the star's middle is at `star`. */
export function balloon() {
  return drawing("balloon.png", 320, 240, (context) => {
    shade(context, 0, 240, "#4678be", "#4678be");
    const corners = Array.from({ length: 10 }, (_, corner) => [corner % 2 ? 27 : 60, (Math.PI * corner) / 5]);
    shape(context, "#ffc83c", corners.map(([reach, angle]) => [90 + reach * Math.sin(angle), 90 - reach * Math.cos(angle)]));
    context.fillStyle = "#dc3232";
    context.beginPath();
    context.ellipse(240, 85, 40, 45, 0, 0, 2 * Math.PI);
    context.fill();
    shape(context, "#dc3232", [[240, 128], [232, 142], [248, 142]]);
    context.strokeStyle = "#5a5a5a";
    context.lineWidth = 3;
    context.beginPath();
    context.moveTo(240, 142);
    context.lineTo(244, 220);
    context.stroke();
  });
}

balloon.star = "90,90";

/** Frames of a ball that crosses a field. */
export function frames(count) {
  const one = (number) =>
    drawing(`frame-${number}.png`, 160, 120, (context) => {
      shade(context, 0, 120, "#78b45a", "#5a9646");
      context.fillStyle = "#f0f0f0";
      context.beginPath();
      context.arc(20 + (120 * number) / count, 60 + 20 * Math.sin((Math.PI * number) / count), 12, 0, 2 * Math.PI);
      context.fill();
    });
  return Promise.all(Array.from({ length: count }, (_, number) => one(number)));
}

/** A second of a tone that rises. */
export function tone() {
  const rate = 16000;
  const samples = Int16Array.from({ length: rate }, (_, place) => 12000 * Math.sin(2 * Math.PI * place * (0.03 + (0.02 * place) / rate)));
  return new File([wavOf([samples], rate)], "tone.wav", { type: "audio/wav" });
}
