//! Real containers on a real node.
