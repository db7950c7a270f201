//! How the attributes of a command lie behind one another.
//!
//! Each has a type and a length of 16 bits. The one exception is data in protocol 2: it has no
//! length, is the last attribute of its command, and goes on to the command's end.

use crate::attribute::Attribute;
use crate::error::Trouble;
use crate::wire::Protocol;

/// One more than the largest number.
const NUMBERS: usize = 32;

/// The attributes of one command.
#[derive(Debug)]
pub(crate) struct Attributes<'a>([Option<&'a [u8]>; NUMBERS]);

impl<'a> Attributes<'a> {
    /// Takes the bytes behind a command's header apart.
    pub(crate) fn parse(protocol: Protocol, mut body: &'a [u8]) -> Result<Self, Trouble> {
        let mut found = [None; NUMBERS];
        while !body.is_empty() {
            let (number, rest) = take_u16(body)?;
            let attribute =
                Attribute::from_number(number).ok_or(Trouble::UnknownAttribute(number))?;
            let (value, rest) = if protocol == Protocol::V2 && attribute == Attribute::Data {
                (rest, &[][..])
            } else {
                let (len, rest) = take_u16(rest)?;
                rest.split_at_checked(len.into()).ok_or(Trouble::AttributeTooLong(attribute))?
            };
            if found[usize::from(number)].replace(value).is_some() {
                return Err(Trouble::Twice(attribute));
            }
            body = rest;
        }
        Ok(Self(found))
    }

    pub(crate) fn get(&self, attribute: Attribute) -> Option<&'a [u8]> {
        self.0[attribute as usize]
    }
}

fn take_u16(bytes: &[u8]) -> Result<(u16, &[u8]), Trouble> {
    let (two, rest) = bytes.split_first_chunk::<2>().ok_or(Trouble::AttributeCutOff)?;
    Ok((u16::from_le_bytes(*two), rest))
}

/// Adds an attribute whose value `write` appends. Fails if that is longer than the protocol can
/// say.
pub(crate) fn push(
    protocol: Protocol,
    body: &mut Vec<u8>,
    attribute: Attribute,
    write: impl FnOnce(&mut Vec<u8>),
) -> Result<(), Trouble> {
    body.extend((attribute as u16).to_le_bytes());
    if protocol == Protocol::V2 && attribute == Attribute::Data {
        write(body);
        return Ok(());
    }
    let at = body.len();
    body.extend([0; 2]);
    write(body);
    let len =
        u16::try_from(body.len() - at - 2).map_err(|_| Trouble::AttributeTooLong(attribute))?;
    body[at..at + 2].copy_from_slice(&len.to_le_bytes());
    Ok(())
}
