// Markdown as DOM nodes. A model's words are only ever set as text: HTML in them stays text, images are never loaded.

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const TABLE = /^\|?\s{0,9}:?-+:?\s{0,9}(\|\s{0,9}:?-+:?\s{0,9})*\|?$/; // the line below a table's head
const RULE = /^\s*([-*_])(\s?\1){2,}\s*$/;
const QUOTE = /^\s*>\s?/;
const BEGIN = /^\s*(```|#{1,6}\s|\||>|([-*+]|\d{1,9}[.)])\s)/; // of anything but a paragraph and a rule
// code, bold, italic, link, mark; bounded, because the end may be missing
const INLINE = /`(.{1,999}?)`|(?<![\w*])\*\*(?=\S)((?:(?!\*\*).){1,999}?)(?<=\S)\*\*(?![\w*])|(?<![\w*])\*(?![\s*])(.{1,999}?)(?<=\S)\*(?![\w*])|\[([^\][]{1,999})\]\((https?:[^\s()]{1,999})\)|\uE000(.{1,999}?)\uE001/g;
const DEEPEST = 8; // nested lists; hostile text could exhaust the stack

function element(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const { 0: all, 1: code, 2: bold, 3: italic, 4: name, 5: href, 6: unsure, index } of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, index));
    if (code) nodes.push(element("code", code));
    else if (href) nodes.push(Object.assign(element("a", name), { href, target: "_blank", rel: "noopener noreferrer" }));
    else if (unsure) nodes.push(Object.assign(element("mark", unsure), { title: "The model was unsure here" }));
    else nodes.push(element(bold ? "strong" : "em", ...inline(bold ?? italic)));
    end = index + all.length;
  }
  return [...nodes, text.slice(end)];
}

/** Return a text's blocks: paragraphs, headings, lists, quotations, rules, tables and code. */
export function markdown(text, depth = 0) {
  if (depth > DEEPEST) return [text];
  const lines = text.split("\n");
  const blocks = [];
  const take = (test) => {
    const end = lines.findIndex((line) => !test(line));
    return lines.splice(0, end < 0 ? lines.length : end);
  };
  const kind = (line = "") => line.match(ITEM)?.[2].replace(/\d+/, "1");
  const isRow = (line) => line.includes("|") && line.length < 2000; // cells take quadratic time
  const row = (line, tag) => {
    const cells = line.trim().replace(/^\||\|$/g, "").split(/\|(?=(?:[^`]*`[^`]*`)*[^`]*$)/);
    return element("tr", ...cells.map((cell) => element(tag, ...inline(cell.trim()))));
  };
  while (take((line) => !line.trim()), lines.length) {
    const line = lines.shift();
    const [, marks, title] = line.match(/^(#{1,6})\s+(.*)/) ?? [];
    if (line.trim().startsWith("```")) {
      blocks.push(element("pre", element("code", take((line) => !line.trim().startsWith("```")).join("\n"))));
      lines.shift();
    } else if (marks) {
      blocks.push(element(`h${Math.min(6, marks.length + 2)}`, ...inline(title)));
    } else if (RULE.test(line)) {
      blocks.push(element("hr"));
    } else if (QUOTE.test(line)) {
      const quoted = [line, ...take((line) => QUOTE.test(line))].map((line) => line.replace(QUOTE, ""));
      blocks.push(element("blockquote", ...markdown(quoted.join("\n"), depth + 1)));
    } else if (kind(line)) {
      const list = element(/\d/.test(kind(line)) ? "ol" : "ul");
      if (list.tagName === "OL") list.start = parseInt(line, 10);
      for (let item = line; item !== undefined; item = kind(lines[0]) === kind(line) ? lines.shift() : undefined) {
        const [head, indent] = item.match(ITEM);
        const rest = take((line) => !line.trim() || line.search(/\S/) > indent.length);
        const inner = [item, ...rest].map((line, at) => line.slice(at ? Math.min(line.search(/\S|$/), head.length) : head.length));
        list.append(element("li", ...markdown(inner.join("\n"), depth + 1)));
      }
      blocks.push(list);
    } else if (isRow(line) && TABLE.test((lines[0] ?? "").trim())) {
      const [, ...rows] = take(isRow);
      blocks.push(element("table", row(line, "th"), ...rows.map((line) => row(line, "td"))));
    } else {
      const more = take((line) => line.trim() && !BEGIN.test(line) && !RULE.test(line));
      blocks.push(element("p", ...inline([line, ...more].join("\n"))));
    }
  }
  return blocks;
}
