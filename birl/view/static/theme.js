// Dark or light before the first paint; "" follows the system.
(() => {
  let kept = "";
  try { kept = localStorage.getItem("birl-theme") || ""; } catch { /* storage is switched off */ }
  if (kept) document.documentElement.dataset.theme = kept;
})();
