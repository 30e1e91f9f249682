// Runs before the page is drawn, so that a chosen theme never flashes in the other one.
try { document.documentElement.dataset.theme = localStorage.getItem("theme") || "auto"; } catch { document.documentElement.dataset.theme = "auto"; }
