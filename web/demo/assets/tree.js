// A conversation as a tree: an edited message or another answer begins a branch beside the old one.
// Nodes are `{ role, content, parent, ... }` in the order in which they were made; `parent` is an index, -1 for the first ones.

/** Indices from the first message to `leaf`. */
export function path({ nodes, leaf }) {
  const indices = [];
  for (let i = leaf; i >= 0; i = nodes[i].parent) indices.unshift(i);
  return indices;
}

/** Indices of the branches at a node, itself among them. */
export const siblings = ({ nodes }, index) =>
  nodes.flatMap(({ parent }, i) => (parent === nodes[index].parent ? [i] : []));

/** The newest leaf below a node. */
export function newest({ nodes }, index) {
  for (let leaf = index; ;) {
    const child = nodes.findLastIndex(({ parent }) => parent === leaf);
    if (child < 0) return leaf;
    leaf = child;
  }
}

/** Adds a node below `parent` and shows it; returns its index. */
export function add(tree, node, parent = tree.leaf) {
  tree.nodes.push({ ...node, parent });
  return (tree.leaf = tree.nodes.length - 1);
}

/** Removes a node that has none below it. */
export function removeLeaf(tree, index) {
  const { parent } = tree.nodes[index];
  tree.nodes.splice(index, 1);
  for (const node of tree.nodes) if (node.parent > index) node.parent -= 1;
  if (tree.leaf === index) tree.leaf = parent;
  else if (tree.leaf > index) tree.leaf -= 1;
}
