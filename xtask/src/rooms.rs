//! The command line has one direction: commands use the modules beside them, and no command uses
//! another.
//!
//! Only the whole command line and the mount helper use commands. What two commands need goes into
//! a module beside the commands.

use crate::lexer;
use std::path::Path;

/// The source of the command line.
const SOURCE: &str = "crates/cli/src";

/// Modules that use commands.
const ABOVE: [&str; 3] = ["lib.rs", "args.rs", "helper.rs"];

/// Lines of a file that go against the direction.
pub(crate) fn upward(path: &Path, text: &str) -> Vec<usize> {
    let Ok(within) = path.strip_prefix(SOURCE) else { return Vec::new() };
    if ABOVE.iter().any(|above| within == Path::new(above)) {
        return Vec::new();
    }
    // Tests stand at the end, and name their own module by `super`.
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    let parent = parent_of_commands(within);
    let is_upward = |line: &str| {
        line.contains("crate::commands") || parent.is_some_and(|parent| line.contains(parent))
    };
    let code = lexer::code(text);
    (1..).zip(code.lines()).filter(|(_, line)| is_upward(line)).map(|(number, _)| number).collect()
}

/// How a module of a command would name the module of all commands.
fn parent_of_commands(within: &Path) -> Option<&'static str> {
    let below = within.strip_prefix("commands").ok()?;
    let name = below.file_name()?.to_str()?;
    match (below.iter().count(), name) {
        (1, "mod.rs") => None,
        (1, _) | (2, "mod.rs") => Some("super::"),
        _ => Some("super::super::"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        upward(&Path::new(SOURCE).join(path), text)
    }

    #[test]
    fn a_room_does_not_use_a_command() {
        assert_eq!(lines("image.rs", "use crate::print;\nuse crate::commands::ls;\n"), [2]);
        assert!(lines("helper.rs", "use crate::commands::mount;\n").is_empty());
        assert!(lines("image.rs", "// Not crate::commands.\n").is_empty());
        assert!(upward(Path::new("crates/fs/src/a.rs"), "use crate::commands;\n").is_empty());
    }

    #[test]
    fn a_command_does_not_use_another() {
        assert_eq!(lines("commands/rm.rs", "use super::ls;\n"), [1]);
        assert_eq!(lines("commands/rm.rs", "use crate::commands::ls;\n"), [1]);
        assert_eq!(lines("commands/map/mod.rs", "use super::inspect::session;\n"), [1]);
        assert_eq!(lines("commands/map/draw.rs", "use super::super::inspect;\n"), [1]);
        for (path, text) in [
            ("commands/map/draw.rs", "use super::layout::Grid;\n"),
            ("commands/rm.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\n    use super::*;\n}\n"),
            ("commands/mod.rs", "mod rm;\n"),
        ] {
            assert!(lines(path, text).is_empty(), "{path}");
        }
    }
}
