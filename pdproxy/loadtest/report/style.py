"""The module says how the page looks, in light and in dark. People who see fewer colours can tell its eight colours
apart as well."""

CSS = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2126; --soft: #5b6670; --rule: #d9dee3; --grid: #e9edf0;
  --good: #2b8a3e; --bad: #d6336c; --warn: #fff3d6; --warn-ink: #6b4a00;
  --c0: #1f6fb4; --c1: #e07b00; --c2: #12876a; --c3: #b5478f;
  --c4: #7a5cc9; --c5: #a88600; --c6: #3aa6d0; --c7: #8d5a3b; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14181c; --ink: #e4e9ed; --soft: #9aa6b1; --rule: #39424b; --grid: #262d34;
  --good: #51c46a; --bad: #ff6b95; --warn: #3d3110; --warn-ink: #ffdf91;
  --c0: #62aaf0; --c1: #ffa94d; --c2: #3fd0a4; --c3: #f08cc8;
  --c4: #b197fc; --c5: #e6c84b; --c6: #7fd6f5; --c7: #cf9b78; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.8rem, 3vw, 2.5rem) 4rem; max-width: 1300px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.3rem; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 0.4rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 0.2rem; }
p { margin: 0.3rem 0 0.7rem; color: var(--soft); max-width: 80ch; }
p.warning { background: var(--warn); color: var(--warn-ink); padding: 0.6rem 0.9rem; border-radius: 6px; }
p.verdict { color: var(--ink); font-size: 1.05rem; }
nav ol { columns: 20rem; padding-left: 1.4rem; font-size: 0.9rem; }
nav a { color: inherit; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 0.6rem 1.2rem; }
/* a shade at the right edge, which the second layer covers where nothing lies behind it */
.stack, .wide { overflow-x: auto; background:
  linear-gradient(to right, transparent, var(--paper) 70%) right / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--rule), transparent) right / 0.9rem 100% no-repeat scroll; }
.stack svg { min-width: 800px; }
svg { display: block; width: 100%; height: auto;
  font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
table { border-collapse: collapse; margin: 0.6rem 0 1rem; font-variant-numeric: tabular-nums; font-size: 0.84rem; }
caption { text-align: left; color: var(--soft); padding-bottom: 0.25rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: calc(100vw - 2.2rem); }
th, td { padding: 0.22rem 0.42rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child { text-align: left; padding-left: 0.2rem; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; }
table.words th, table.words td { text-align: left; }
table.words td { white-space: normal; overflow-wrap: anywhere; }
details { margin: 0.4rem 0; }
details.chapter { border-top: 1px solid var(--rule); margin-top: 1.6rem; padding-top: 0.4rem; }
summary { cursor: pointer; color: var(--soft); padding: 0.3rem 0; }
details.chapter > summary { color: var(--ink); font-size: 1.25rem; font-weight: 600; }
summary:focus-visible { outline: 2px solid var(--c0); outline-offset: 3px; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; font-size: 0.88rem; }
.legend span { display: inline-flex; align-items: center; gap: 0.4rem; color: var(--ink); }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px; background: var(--mark); }
.key.dashed { background: none; height: 0; border-top: 2px dashed var(--soft); border-radius: 0; }
.key.faint { opacity: 0.5; }
.key.warmup { background: var(--soft); opacity: 0.25; }
.key.hollow { background: none; border: 2px solid var(--soft); border-radius: 50%; }
.c0 { --mark: var(--c0); } .c1 { --mark: var(--c1); } .c2 { --mark: var(--c2); } .c3 { --mark: var(--c3); }
.c4 { --mark: var(--c4); } .c5 { --mark: var(--c5); } .c6 { --mark: var(--c6); } .c7 { --mark: var(--c7); }
.good { --mark: var(--good); } .bad, .failures, .limit { --mark: var(--bad); } .faint { --mark: var(--soft); }
svg .grid { stroke: var(--grid); }
svg .frame { stroke: var(--rule); fill: none; }
svg text { fill: var(--soft); }
svg .title { fill: var(--ink); font-weight: 600; font-size: 12.5px; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .line { fill: none; stroke: var(--mark); stroke-width: 1.8; stroke-linejoin: round; }
svg .line.faint { stroke-width: 1.1; stroke-dasharray: 2 3; opacity: 0.8; }
svg .line.dashed { stroke-width: 1.3; stroke-dasharray: 5 4; }
svg .specks { fill: none; stroke: var(--mark); stroke-width: 3.4; stroke-linecap: round; opacity: 0.7; }
svg .specks.failures { stroke-width: 7; stroke-linecap: square; opacity: 0.75; }
svg .dot { fill: var(--mark); stroke: var(--paper); stroke-width: 1.2; }
svg .dot.hollow { fill: var(--paper); stroke: var(--mark); stroke-width: 2; }
svg .bar { fill: var(--mark); }
svg .bar.warmup { fill: var(--soft); opacity: 0.14; }
svg .level { stroke: var(--mark); stroke-dasharray: 6 4; stroke-width: 1.2; }
svg .flag { stroke: var(--ink); stroke-dasharray: 3 3; opacity: 0.7; }
svg .event { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
@media print { details > * { display: block; } .row { grid-template-columns: 1fr 1fr; } }
"""
