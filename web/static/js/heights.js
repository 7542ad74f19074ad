// Keeps the height of live parts of a page, so that the content below does not jump at every update.
(() => {
  const SHRINK_AFTER_MS = 20_000;
  const live = document.getElementById("live");
  if (!live) return;
  let heights = [];

  // While requests are in flight, their table never shrinks, so that the history below does not move.
  const keepRequestsHeight = () => (live.style.minHeight = live.querySelector("[id^=live-req]") ? `${live.offsetHeight}px` : "");
  // On the overview, tenants come and go several times a second: their list grows at once and shrinks only after a while.
  const keepTenantsHeight = () =>
    live.querySelectorAll(".shares").forEach((list, i) => {
      list.style.minHeight = "";
      const height = list.offsetHeight;
      if (!(heights[i]?.height > height && Date.now() - heights[i].since < SHRINK_AFTER_MS)) heights[i] = { height, since: Date.now() };
      list.style.minHeight = `${heights[i].height}px`;
    });

  keepTenantsHeight();
  document.addEventListener("htmx:after:swap", (event) => event.detail.ctx?.target === live && (keepRequestsHeight(), keepTenantsHeight()));
  addEventListener("resize", () => ((live.style.minHeight = ""), (heights = [])));
})();
