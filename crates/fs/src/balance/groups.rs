//! The chunks that there are, as filters look at them.

use super::filters::Candidate;
use crate::engine::Core;
use crate::space::SpaceKind;
use larder_format::items::{BlockGroupFlags, Profile};

/// All chunks, by rising address.
pub(super) fn all(core: &Core) -> Vec<Candidate> {
    let map = core.volume.map();
    let of = |group: &std::sync::Arc<crate::space::groups::BlockGroup>| {
        let run = group.run();
        let chunk = map.chunk_at(run.start)?;
        let count = u16::try_from(chunk.stripes.len()).unwrap_or(u16::MAX);
        let profile = group.flags().profile().unwrap_or(Profile::Single);
        Some(Candidate {
            start: run.start,
            len: run.len,
            used: group.usage().allocated,
            flags: group.flags(),
            stripe_len: profile.stripe_bytes(run.len, count),
            stripes: chunk.stripes.to_vec(),
        })
    };
    core.space.groups.all().iter().filter_map(of).collect()
}

/// What space in such chunks is for.
pub(super) fn kind_of(flags: BlockGroupFlags) -> SpaceKind {
    if flags.contains(BlockGroupFlags::SYSTEM) {
        SpaceKind::System
    } else if flags.contains(BlockGroupFlags::DATA) {
        SpaceKind::Data
    } else {
        SpaceKind::Metadata
    }
}
