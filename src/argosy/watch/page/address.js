// What is chosen on a page is kept in the address after #, so that a link, a reload and the browser's history show the same.
export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { path, query: new URLSearchParams(query) };
}

// changes: {name: value or values}; null, "" and [] leave the name out. The page is not opened again.
export function keep(changes) {
  const { path, query } = here();
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  history.replaceState(history.state, "", address(path, query));
}

export function address(path, query = []) {
  const text = new URLSearchParams(query).toString();
  return "#/" + path + (text ? "?" + text : "");
}
