//! Extended headers of POSIX: records `LENGTH KEYWORD=VALUE`, in which a value may have any bytes.
//!
//! A local header is about the next member, a global one about all that follow. A local record lies
//! over a global one, and an empty value takes a keyword back. [`Extended`] gives what holds for
//! one member. Records stay in their order, since in the oldest form of sparse files a keyword
//! comes many times.

use crate::Time;
use crate::rules::decimal_time;

/// A keyword and its value.
pub(crate) type Said = (Vec<u8>, Vec<u8>);

/// The records of a header. `None` if it is not made of records.
pub(crate) fn parse(mut text: &[u8]) -> Option<Vec<Said>> {
    let mut said = Vec::new();
    while !text.is_empty() {
        let blank = text.iter().take(20).position(|&b| b == b' ')?;
        let len: usize = str::from_utf8(&text[..blank]).ok()?.parse().ok()?;
        if len <= blank + 1 || len > text.len() || text[len - 1] != b'\n' {
            return None;
        }
        let record = &text[blank + 1..len - 1];
        let equals = record.iter().position(|&b| b == b'=')?;
        said.push((record[..equals].to_vec(), record[equals + 1..].to_vec()));
        text = &text[len..];
    }
    Some(said)
}

/// What is said of a member.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extended {
    pub(crate) global: Vec<Said>,
    pub(crate) local: Vec<Said>,
}

impl Extended {
    /// The value of a keyword.
    pub(crate) fn get(&self, keyword: &[u8]) -> Option<&[u8]> {
        let last = |said: &'_ [Said]| said.iter().rposition(|(k, _)| k == keyword);
        let value = match (last(&self.local), last(&self.global)) {
            (Some(at), _) => &self.local[at].1,
            (None, Some(at)) => &self.global[at].1,
            (None, None) => return None,
        };
        (!value.is_empty()).then_some(value)
    }

    /// A keyword's decimal number. The error is a value that is none.
    pub(crate) fn number(&self, keyword: &[u8]) -> Result<Option<u64>, String> {
        let Some(value) = self.get(keyword) else { return Ok(None) };
        let number = str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        number.map(Some).ok_or_else(|| wrong(keyword, value))
    }

    /// A keyword's time.
    pub(crate) fn time(&self, keyword: &[u8]) -> Result<Option<Time>, String> {
        let Some(value) = self.get(keyword) else { return Ok(None) };
        decimal_time(value).map(Some).ok_or_else(|| wrong(keyword, value))
    }

    /// Keywords that begin with `prefix`, without it, and their values: each once, sorted. Empty
    /// values are values here, as extended attributes may be empty.
    pub(crate) fn with_prefix(&self, prefix: &[u8]) -> Vec<Said> {
        let mut found = std::collections::BTreeMap::new();
        for (keyword, value) in self.global.iter().chain(&self.local) {
            if let Some(rest) = keyword.strip_prefix(prefix) {
                found.insert(rest.to_vec(), value.clone());
            }
        }
        found.into_iter().collect()
    }

    /// Takes in one more global header.
    pub(crate) fn add_global(&mut self, said: Vec<Said>) {
        for (keyword, value) in said {
            self.global.retain(|(k, _)| *k != keyword);
            self.global.push((keyword, value));
        }
    }
}

fn wrong(keyword: &[u8], value: &[u8]) -> String {
    let (keyword, value) = (crate::error::shown(keyword), crate::error::shown(value));
    format!("its extended header has {keyword}={value}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_may_have_any_bytes() {
        let said = parse(b"12 a=b\n=\nc\0\n5 d=\n").unwrap();
        assert_eq!(said[0], (b"a".to_vec(), b"b\n=\nc\0".to_vec()));
        assert_eq!(said[1], (b"d".to_vec(), Vec::new()));
    }

    #[test]
    fn what_is_no_record_is_nothing() {
        for text in [
            &b"5 a=b"[..],
            b"6 a=bc",
            b"7 a=b\n",
            b"6 a-b\n",
            b"0 a=b\n",
            b" 6 a=b\n",
            b"99999999999999999999 a=b\n",
            b"-6 a=b\n",
            b"2 \n",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn local_records_lie_over_global_ones() {
        let mut extended = Extended::default();
        extended.add_global(parse(b"8 uid=1\n8 gid=2\n").unwrap());
        extended.local = parse(b"8 uid=3\n7 gid=\n").unwrap();
        assert_eq!(extended.number(b"uid"), Ok(Some(3)));
        assert_eq!(extended.number(b"gid"), Ok(None));
        extended.local = parse(b"8 uid=x\n").unwrap();
        assert!(extended.number(b"uid").is_err());
        assert_eq!(extended.number(b"gid"), Ok(Some(2)));
    }
}
