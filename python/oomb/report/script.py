"""The page's only script: the values under a mouse, a finger or the arrow keys."""

SCRIPT = """
"use strict";
const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const charts = [];
for (const chart of document.querySelectorAll(".chart")) {
  const values = JSON.parse(chart.dataset.values);
  const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip");
  const cursor = svg.querySelector(".cursor"), rule = cursor.querySelector("path");
  const marks = cursor.querySelectorAll("circle");
  const along = ([low, high, begin, end], value) =>
    begin + (value - low) / (high - low) * (end - begin);
  const places = [...new Set(values.series.flatMap(one => one.points.map(p => p[0])))]
    .sort((a, b) => a - b);
  let shown = -1;

  const nearest = (points, x) =>
    points.reduce((best, p) => Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best);

  const hide = () => { shown = -1; tip.hidden = true; cursor.style.display = "none"; };

  const show = index => {
    if (!places.length) return;
    shown = Math.max(0, Math.min(places.length - 1, index));
    const x = places[shown], at = along(values.x, x);
    const [, , bottom, top] = values.y;
    rule.setAttribute("d", `M${at} ${top}V${bottom}`);
    tip.replaceChildren(row("", `${values.one} ${whole.format(x)}`, ""));
    let total = 0, parts = 0;
    values.series.forEach((one, n) => {
      const point = one.points.length ? nearest(one.points, x) : [Infinity, 0];
      // A value of another place tells which, and only one close by is told.
      const close = Math.abs(along(values.x, point[0]) - at) < (values.stacked ? 1e-6 : 4);
      if (marks[n]) marks[n].style.display = close ? "" : "none";
      if (!close || (values.stacked && !point[1])) return;
      if (marks[n]) {
        marks[n].setAttribute("cx", along(values.x, point[0]));
        marks[n].setAttribute("cy", along(values.y, point[1]));
      }
      const where = point[0] === x ? "" : ` at ${whole.format(point[0])}`;
      tip.append(row(`b${one.color}`, one.name + where, told(point[1])));
      total += point[1];
      parts += 1;
    });
    if (values.stacked && parts > 1) tip.append(row("", "together", told(total)));
    cursor.style.display = "inline";
    tip.hidden = false;
    const share = at / svg.viewBox.baseVal.width;
    tip.style.left = share < 0.5 ? `calc(${100 * share}% + 12px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${100 - 100 * share}% + 12px)`;
  };

  const told = value => plain.format(value) + (values.sign ? ` ${values.sign}` : "");

  const row = (color, name, text) => {
    const line = document.createElement("div"), dot = document.createElement("i");
    const label = document.createElement("span"), value = document.createElement("b");
    dot.className = color;
    label.textContent = name;
    value.textContent = text;
    line.append(...(color ? [dot] : []), label, value);
    return line;
  };

  const point = event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const close = places.map(x => Math.abs(along(values.x, x) - at));
    show(close.indexOf(Math.min(...close)));
  };

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", e => { if (e.pointerType === "mouse") hide(); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined) return;
    event.preventDefault();
    show(shown < 0 ? (step > 0 ? 0 : places.length - 1) : shown + step);
  });
  charts.push([chart, hide]);
}
// A tap beside a chart puts its values away.
document.addEventListener("pointerdown", event => {
  for (const [chart, hide] of charts) if (!chart.contains(event.target)) hide();
});
"""
