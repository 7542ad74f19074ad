// Copies the text that a button names. Without clipboard access (plain HTTP) it selects the text instead and says so.
(() => {
  const select = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.querySelector(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      select(source);
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    }
  });
})();
