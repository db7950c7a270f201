//! Comments, messages and documents name their subject: no clause begins with "who" for the one
//! that does something.
//!
//! A reader whose third language is English has to read "by who brings it" twice. "The caller" or
//! "the waiter" says the same. No rule of text can find every such clause; this one finds those
//! that begin with one of the [`VERBS`] where a clause begins. It holds in all files.

use crate::lexer::{self, Kind};

/// What "who" is followed by where it stands for a subject.
const VERBS: [&str; 31] = [
    "asks", "brings", "calls", "cannot", "closes", "comes", "deletes", "does", "finds", "flushes",
    "gets", "gives", "has", "holds", "keeps", "knows", "leads", "looks", "makes", "may", "needs",
    "opens", "reads", "sees", "takes", "tells", "uses", "waits", "wants", "works", "writes",
];

/// What a clause begins behind. The beginning of a text counts, too.
const BEFORE: [&str; 9] = [". ", ", ", ": ", "; ", " by ", " to ", " for ", " of ", " than "];

/// Lines of a Rust file, and the words that are to be replaced.
pub(crate) fn in_rust(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut comment = Paragraph::default();
    for part in lexer::parts(text) {
        let line = text[..part.at.start].matches('\n').count() + 1;
        let words = &text[part.at.clone()];
        match part.kind {
            Kind::Comment => {
                let bare = words.trim_start_matches(['/', '!', '*']);
                // Text that goes on in the next line is one paragraph.
                if !comment.goes_on_at(line) || bare.trim().is_empty() {
                    found.extend(comment.take());
                }
                comment.add(line, bare);
            }
            Kind::Literal | Kind::Raw => {
                let mut literal = Paragraph::default();
                let quoted = words.trim_matches(['"', 'r', 'b', '#']);
                for (number, part) in (line..).zip(quoted.lines()) {
                    literal.add(number, part.trim_end_matches('\\'));
                }
                found.extend(literal.take());
            }
            Kind::Code => {}
        }
    }
    found.extend(comment.take());
    found.sort();
    found
}

/// The same for a document.
pub(crate) fn in_markdown(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut paragraph = Paragraph::default();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() {
            found.extend(paragraph.take());
        }
        paragraph.add(number, line);
    }
    found.extend(paragraph.take());
    found
}

/// Lines of text that belong together, joined, and where each of them begins.
#[derive(Debug, Default)]
struct Paragraph {
    text: String,
    lines: Vec<(usize, usize)>,
}

impl Paragraph {
    fn add(&mut self, number: usize, line: &str) {
        self.lines.push((self.text.len(), number));
        self.text.push_str(&line.trim().to_lowercase());
        self.text.push(' ');
    }

    fn goes_on_at(&self, number: usize) -> bool {
        self.lines.last().is_some_and(|(_, last)| last + 1 == number)
    }

    /// What is to be replaced in it; it is empty afterwards.
    fn take(&mut self) -> Vec<(usize, String)> {
        let Self { text, lines } = std::mem::take(self);
        let line_of = |at: usize| lines.iter().rfind(|(start, _)| *start <= at).map_or(0, |l| l.1);
        let words = text.match_indices("who").filter_map(|(at, _)| {
            let word = subject(&text, at)?;
            Some((line_of(at), word))
        });
        words.collect()
    }
}

/// The words at `at`, where "who" is, if they stand for a subject.
fn subject(text: &str, at: usize) -> Option<String> {
    if text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let mut words = text[at..].split(' ');
    let who = words.next()?;
    if who.starts_with("whoever") {
        return Some(who.trim_end_matches(|c: char| !c.is_alphabetic()).to_owned());
    }
    let verb = words.next().filter(|_| who == "who")?;
    let begins = at == 0 || BEFORE.iter().any(|before| text[..at].ends_with(before));
    (begins && VERBS.contains(&verb)).then(|| format!("who {verb}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(rest: &str) -> String {
        format!("{}{rest}", "who")
    }

    #[test]
    fn a_clause_for_a_subject_is_found() {
        let ever = who("ever");
        for (text, words) in [
            (format!("// Given to {ever} comes.\n"), ever.clone()),
            (format!("/// {} is told.\n", who(" asks")), who(" asks")),
            (format!("// It is done, {} more.\n", who(" wants")), who(" wants")),
            (format!("f(\"held by {} it\");\n", who(" holds")), who(" holds")),
        ] {
            assert_eq!(in_rust(&text), [(1, words)], "{text}");
        }
        let over = format!("//! Set by\n//! {} it.\nfn f() {{}}\n", who(" needs"));
        assert_eq!(in_rust(&over), [(2, who(" needs"))]);
        let over = format!("f(\"set \\\n    by \\\n    {} it\");\n", who(" needs"));
        assert_eq!(in_rust(&over), [(3, who(" needs"))]);
        assert_eq!(in_markdown(&format!("a\nfor\n{}\n", who(" waits"))), [(3, who(" waits"))]);
    }

    #[test]
    fn persons_and_questions_are_left_alone() {
        for text in [
            format!("// The process {} it.\n", who(" holds")),
            format!("// The user {} it.\n", who(" may read")),
            format!("let a = {}; // said\n", who("_asks")),
            format!("// by\nfn {}() {{}}\n", who("_asks")),
            format!("// Only user 0, {} it.\n", who(" mounted")),
        ] {
            assert!(in_rust(&text).is_empty(), "{text}");
        }
    }
}
