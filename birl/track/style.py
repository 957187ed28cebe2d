"""The report's style sheet: light and dark, wide and narrow."""

CSS = """
:root { color-scheme: light dark; --bg:#f7f8fa; --card:#fff; --ink:#1b1f24; --soft:#626b77; --edge:#e2e5ea;
  --grid:#eceef2;
  --good:#137a3f; --bad:#b3261e; --good-bg:#eaf6ee; --bad-bg:#fcedec; --hover:rgba(60,80,120,.10);
  --c0:#2563eb; --c1:#e07b16; --c2:#16925a; --c3:#b8369b; --c4:#7657d6; --c5:#8a929e; --c6:#0e93a6;
  --c7:#a8790a; }
@media (prefers-color-scheme: dark) { :root { --bg:#111418; --card:#191d23; --ink:#e6e9ee; --soft:#98a2b0;
  --edge:#2a3038;
  --grid:#252b33; --good:#5cd08d; --bad:#ff8a80; --good-bg:#13281c; --bad-bg:#311a1a;
  --hover:rgba(160,180,220,.12);
  --c0:#6ea0ff; --c1:#f3a04c; --c2:#4fc78c; --c3:#e57fcd; --c4:#a894f5; --c5:#8f99a6; --c6:#4cc3d4;
  --c7:#d8ab42; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--bg); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; }
main { max-width:1120px; margin:0 auto; padding:32px 20px 64px; }
h1 { font-size:26px; line-height:1.25; margin:0 0 2px; overflow-wrap:anywhere; } h2 { font-size:18px;
  margin:40px 0 12px; }
.soft { color:var(--soft); } p { margin:4px 0 12px; overflow-wrap:anywhere; }
.facts { display:grid; grid-template-columns:repeat(auto-fit,minmax(220px,1fr)); gap:12px; margin:20px 0 0; }
.fact, figure, .pair, details, .box { background:var(--card); border:1px solid var(--edge);
  border-radius:10px; }
.fact { padding:14px 16px; } .fact b { display:block; font-size:25px; line-height:1.25;
  font-variant-numeric:tabular-nums; font-weight:650; white-space:nowrap; }
.fact i { font-style:normal; color:var(--soft); font-weight:400; } .fact span { color:var(--soft);
  font-size:13px; }
.curves { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr)); gap:12px; }
figure { margin:0; padding:12px 14px 8px; min-width:0; } svg { display:block; width:100%; height:auto; }
figcaption { display:flex; flex-wrap:wrap; gap:2px 14px; align-items:baseline; margin-bottom:6px;
  overflow-wrap:anywhere; }
.legend { display:flex; flex-wrap:wrap; gap:2px 12px; font-size:12.5px; color:var(--soft); }
.legend i { display:inline-block; width:10px; height:10px; border-radius:3px; background:var(--c);
  margin-right:5px; }
svg text { fill:var(--soft); font-size:10.5px; font-variant-numeric:tabular-nums; }
  .grid { stroke:var(--grid); }
.line { fill:none; stroke:var(--c); stroke-width:1.8; stroke-linejoin:round; }
.raw { opacity:.3; stroke-width:1; } circle, .bar { fill:var(--c); }
.hit path { fill:transparent; } .hit path:hover { fill:var(--hover); }
.c0{--c:var(--c0)} .c1{--c:var(--c1)} .c2{--c:var(--c2)} .c3{--c:var(--c3)} .c4{--c:var(--c4)}
  .c5{--c:var(--c5)} .c6{--c:var(--c6)} .c7{--c:var(--c7)}
.pair { margin:0 0 12px; overflow:hidden; } .prompt { padding:10px 14px;
  border-bottom:1px solid var(--edge); }
.sides { display:grid; grid-template-columns:1fr 1fr; } .side { padding:10px 14px; min-width:0; }
  .side + .side { border-left:1px solid var(--edge); }
.right { background:var(--good-bg); } .wrong { background:var(--bad-bg); }
.verdict { font-size:12.5px; font-weight:600; color:var(--soft); } .right .verdict { color:var(--good); }
  .wrong .verdict { color:var(--bad); }
.text { white-space:pre-wrap; overflow-wrap:anywhere; unicode-bidi:isolate; overflow:hidden;
  max-height:24em; overflow-y:auto; }
pre { margin:0; padding:12px 14px; white-space:pre-wrap; overflow-wrap:anywhere;
  font:13px/1.5 ui-monospace,SFMono-Regular,Consolas,"DejaVu Sans Mono",monospace; }
details { margin:0 0 12px; } summary { cursor:pointer; padding:10px 14px; font-weight:600; }
  details > .inside { padding:0 14px 14px; }
.tables { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr)); gap:12px;
  align-items:start; }
table { width:100%; border-collapse:collapse; font-variant-numeric:tabular-nums; } td,
  th { padding:6px 14px; text-align:right; font-weight:400; }
td:first-child, th:first-child { text-align:left; } th { color:var(--soft); font-size:13px; }
  tr + tr > * { border-top:1px solid var(--edge); }
@media (max-width:640px) { main { padding:20px 12px 48px; } .sides { grid-template-columns:1fr; }
  .side + .side { border-left:0; border-top:1px solid var(--edge); } h1 { font-size:21px; }
  .fact b { font-size:18px; }
  .facts { grid-template-columns:1fr 1fr; } }
"""
