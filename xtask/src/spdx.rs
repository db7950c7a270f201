//! Licence expressions as packages state them: SPDX, and the older `A/B` for `A OR B`.
//!
//! Hidden here is the grammar: `WITH` binds tightest, then `AND`, then `OR`; parentheses group.
//! What a caller learns is only whether an expression can be satisfied with a set of licences.

use anyhow::{Result, bail, ensure};

/// Can `expression` be satisfied with licences for which `allowed` holds? A licence with an
/// exception is asked for as `LICENCE WITH EXCEPTION`.
pub(crate) fn is_satisfied(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser { tokens: &tokens, allowed };
    let satisfied = parser.alternatives()?;
    ensure!(parser.tokens.is_empty(), "{:?} is left over in {expression:?}", parser.tokens);
    Ok(satisfied)
}

struct Parser<'a> {
    tokens: &'a [&'a str],
    allowed: &'a dyn Fn(&str) -> bool,
}

impl<'a> Parser<'a> {
    fn next(&mut self) -> Option<&'a str> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first)
    }

    fn accept(&mut self, word: &str) -> bool {
        let found = self.tokens.first() == Some(&word);
        if found {
            self.tokens = &self.tokens[1..];
        }
        found
    }

    fn alternatives(&mut self) -> Result<bool> {
        let mut any = self.all()?;
        while self.accept("OR") {
            any |= self.all()?;
        }
        Ok(any)
    }

    fn all(&mut self) -> Result<bool> {
        let mut all = self.one()?;
        while self.accept("AND") {
            all &= self.one()?;
        }
        Ok(all)
    }

    fn one(&mut self) -> Result<bool> {
        match self.next() {
            Some("(") => {
                let inner = self.alternatives()?;
                ensure!(self.accept(")"), "a parenthesis is not closed");
                Ok(inner)
            }
            Some(word @ (")" | "AND" | "OR" | "WITH")) => {
                bail!("{word} where a licence is expected")
            }
            Some(licence) if self.accept("WITH") => match self.next() {
                Some(exception) => Ok((self.allowed)(&format!("{licence} WITH {exception}"))),
                None => bail!("WITH without an exception"),
            },
            Some(licence) => Ok((self.allowed)(licence)),
            None => bail!("the expression ends where a licence is expected"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(expression: &str) -> bool {
        is_satisfied(expression, &|l| {
            ["MIT", "Apache-2.0", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"].contains(&l)
        })
        .unwrap()
    }

    #[test]
    fn operators_bind_as_spdx_says() {
        assert!(ok("MIT"));
        assert!(!ok("GPL-2.0-only"));
        assert!(ok("GPL-2.0-only OR MIT"));
        assert!(!ok("GPL-2.0-only AND MIT"));
        assert!(ok("MIT OR GPL-2.0-only AND LGPL-2.1-or-later"), "AND binds tighter than OR");
        assert!(!ok("(MIT OR GPL-2.0-only) AND LGPL-2.1-or-later"));
        assert!(ok("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(ok("Apache-2.0 WITH LLVM-exception"));
        assert!(!ok("MIT WITH LLVM-exception"));
        assert!(!ok("GPL-2.0-only WITH Classpath-exception-2.0 AND MIT"));
    }

    #[test]
    fn a_slash_is_the_older_or() {
        assert!(ok("MIT/GPL-2.0-only"));
        assert!(ok("GPL-2.0-only / MIT"));
        assert!(!ok("GPL-2.0-only/LGPL-2.1-or-later"));
    }

    #[test]
    fn nonsense_is_an_error_not_a_licence() {
        for bad in ["", "(MIT", "MIT)", "MIT OR", "AND MIT", "MIT Apache-2.0", "MIT WITH", "()"] {
            assert!(is_satisfied(bad, &|_| true).is_err(), "{bad:?}");
        }
    }
}
