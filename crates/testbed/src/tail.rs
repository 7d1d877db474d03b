//! The end of a log file, for error messages.

use std::path::Path;

/// The last `lines` lines of the file, or a note on why there are none.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    match std::fs::read(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let skipped = text.lines().count().saturating_sub(lines);
            text.lines().skip(skipped).collect::<Vec<_>>().join("\n")
        }
        Err(error) => format!("(cannot read {}: {error})", path.display()),
    }
}
