//! temp
use crate::*;
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Expect {
    pub nodesize: u32,
    pub fsid: [u8; 16],
    pub bytenr: Logical,
    pub level: Option<u8>,
    pub generation: Option<Generation>,
    pub owner: Option<TreeId>,
    pub is_root: bool,
    pub first_key: Option<Key>,
    pub csum: Option<CsumType>,
    pub super_generation: Generation,
}
#[allow(missing_docs)]
pub fn check_node(_bytes: &[u8], _expect: &Expect) -> FormatResult<()> {
    Ok(())
}
