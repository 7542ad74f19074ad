// Keeps live parts of a page at the height that they have reached, so that the content below does not jump at every tick.
(() => {
  const HELD_MS = 20_000;
  const live = document.getElementById("live");
  if (!live) return;
  let held = [];

  // While requests are in flight, their table keeps its height, so that the history below does not move.
  const holdRequests = () => (live.style.minHeight = live.querySelector("[id^=live-req]") ? `${live.offsetHeight}px` : "");
  // On the overview tenants come and go several times a second: their list grows at once and shrinks only after a while.
  const holdTenants = () =>
    live.querySelectorAll(".shares").forEach((list, i) => {
      list.style.minHeight = "";
      const height = list.offsetHeight;
      if (!(held[i]?.height > height && Date.now() - held[i].since < HELD_MS)) held[i] = { height, since: Date.now() };
      list.style.minHeight = `${held[i].height}px`;
    });

  holdTenants();
  document.addEventListener("htmx:after:swap", (event) => event.detail.ctx?.target === live && (holdRequests(), holdTenants()));
  addEventListener("resize", () => ((live.style.minHeight = ""), (held = [])));
})();
