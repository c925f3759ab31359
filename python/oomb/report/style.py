"""How the page looks: light and dark, on a desk and on a phone."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --muted: #5d6773; --line: #e3e6ea;
  --page: #f6f7f9; --card: #ffffff; --tip: #ffffff;
  --c0: #0072b2; --c1: #d98600; --c2: #56b4e9; --c3: #d55e00; --c4: #009e73; --c5: #cc79a7;
  --c6: #a3abb4; --c7: #8a6fd1 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --muted: #9aa5b1; --line: #2c333a;
  --page: #0f1317; --card: #171c21; --tip: #20272e;
  --c0: #3a9bdc; --c1: #f0ab2e; --c2: #8fd0f5; --c3: #f0803c; --c4: #2fc295; --c5: #e29cc3;
  --c6: #6b747d; --c7: #ab94ea } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 28px 20px 60px; max-width: 1240px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 16px; margin: 0; font-weight: 600 }
.of { font-weight: 400; color: var(--muted) }
.sub, p.note { color: var(--muted); margin: 4px 0 18px; overflow-wrap: anywhere }
p.note { margin: 8px 0 0; font-size: 13px }
h3 { display: flex; align-items: center; gap: 8px; font-size: 15px; font-weight: 600;
  margin: 14px 0 6px }
h3 i { width: 12px; height: 12px; border-radius: 3px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px;
  margin-bottom: 14px }
.tiles div, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px }
.tiles div { padding: 10px 13px }
.tiles b { display: block; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums }
.tiles span { color: var(--muted); font-size: 12.5px; line-height: 1.3; display: block }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 14px }
section { padding: 14px 16px; min-width: 0 }
section.wide { margin-top: 14px; overflow-x: auto }
section.wide h2 { margin-bottom: 10px }
.axis-label { color: var(--muted); font-size: 13px; margin: 0 0 4px }
.chart { position: relative }
svg { width: 100%; height: auto; display: block; overflow: visible; touch-action: pan-y;
  cursor: crosshair; border-radius: 6px }
svg:focus { outline: none } svg:focus-visible { outline: 2px solid var(--c0) }
svg text { fill: var(--muted); font-size: 11.5px; font-variant-numeric: tabular-nums }
svg .end { text-anchor: end } svg .mid { text-anchor: middle }
svg .told { paint-order: stroke; stroke: var(--card); stroke-width: 4px }
.grid, .axis, .border, .cursor path { fill: none; stroke: var(--line);
  vector-effect: non-scaling-stroke }
.axis, .border { stroke: var(--muted) } .border { stroke-dasharray: 4 4 }
.cursor { display: none; pointer-events: none } .cursor path { stroke: var(--ink); opacity: .5 }
.cursor circle { stroke: var(--card); stroke-width: 1.5 }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; vector-effect: non-scaling-stroke }
.thin { stroke-width: 1.2 } .line.faint { stroke-width: 1.2 } .faint { opacity: .35 }
.limit { stroke-width: 1.4; stroke-dasharray: 7 4 } .area { opacity: .2 }
.tip { position: absolute; top: 8px; padding: 7px 10px; background: var(--tip);
  border: 1px solid var(--line); border-radius: 8px; box-shadow: 0 3px 14px rgb(0 0 0 / .16);
  font-size: 13px; line-height: 1.45; pointer-events: none; max-width: 72%; z-index: 1 }
.tip div { display: flex; align-items: baseline; gap: 7px }
.tip div:first-child { font-weight: 600 }
.tip i { flex: none; width: 9px; height: 9px; border-radius: 2px }
.tip b { margin-left: auto; padding-left: 10px; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--muted); font-size: 13px;
  padding: 6px 0 0 }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 14px }
figure { margin: 0 } figure img { width: 100%; image-rendering: pixelated; display: block;
  border: 1px solid var(--line); background: var(--page) }
figcaption { color: var(--muted); font-size: 12.5px; margin-top: 4px }
table { border-collapse: collapse; font-size: 13.5px }
th, td { text-align: left; padding: 4px 22px 4px 0; border-bottom: 1px solid var(--line);
  font-weight: 400; vertical-align: top; font-variant-numeric: tabular-nums }
th { color: var(--muted) } .differs td { color: var(--c3); font-weight: 600 }
pre { overflow-x: auto; font-size: 13px; margin: 8px 0 0 }
details { margin-top: 10px } summary { cursor: pointer }
@media (max-width: 640px) {
  body { padding: 18px 12px 40px } section { padding: 12px 12px }
  svg text { font-size: 16px }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(100px, 1fr)); gap: 8px }
  .tiles div { padding: 8px 10px } .tiles b { font-size: 16px }
  .maps { grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)) }
  th, td { padding-right: 12px }
}
@media print { section { break-inside: avoid } }
"""
_COLORS = "".join(
    f".s{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}.b{n}{{background:var(--c{n})}}"
    for n in range(8)
)
STYLE = _STYLE + _COLORS
