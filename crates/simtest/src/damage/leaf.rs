//! A leaf as a list of items: taken apart, changed, packed again.
//!
//! The data of items has to lie without gaps from the end of the node backwards, in the order of
//! the keys, so a change of one length moves all that follow. Taking the leaf apart and packing it
//! anew is simple and cannot get that wrong.

use super::raw;
use anyhow::{Context, Result, ensure};
use larder_format::Key;
use larder_format::node::{HEADER_SIZE, ITEM_SIZE, NodeView, leaf_capacity};

/// The items of a leaf, in its order.
pub(super) fn unpack(node: &[u8]) -> Result<Vec<(Key, Vec<u8>)>> {
    let view = NodeView(node);
    ensure!(view.level() == 0, "node {} is no leaf", view.bytenr());
    (0..view.nritems())
        .map(|slot| {
            let key = view.key(slot).context("an item of the leaf")?;
            Ok((key, view.data(slot).with_context(|| format!("data of {key}"))?.to_vec()))
        })
        .collect()
}

/// Writes the items into the leaf, whose header stays but for their number.
pub(super) fn pack(node: &mut [u8], items: &[(Key, Vec<u8>)]) -> Result<()> {
    let capacity = leaf_capacity(u32::try_from(node.len())?);
    let needed: usize = items.iter().map(|(_, data)| ITEM_SIZE + data.len()).sum();
    ensure!(
        needed <= capacity,
        "items of {needed} bytes do not fit a leaf of {capacity}: choose another"
    );
    node[HEADER_SIZE..].fill(0);
    raw::header(node).nritems.set(u32::try_from(items.len())?);
    let mut end = capacity;
    for (slot, (key, data)) in items.iter().enumerate() {
        end -= data.len();
        let header = raw::item(node, slot);
        header.key = (*key).into();
        header.offset.set(u32::try_from(end)?);
        header.size.set(u32::try_from(data.len())?);
        node[HEADER_SIZE + end..][..data.len()].copy_from_slice(data);
    }
    Ok(())
}

/// Where to cut a list of items so that two leaves of nodes of `nodesize` bytes hold it, about half
/// each; `None` if they cannot.
pub(super) fn balance(items: &[(Key, Vec<u8>)], nodesize: usize) -> Option<usize> {
    let capacity = leaf_capacity(u32::try_from(nodesize).ok()?);
    let size = |items: &[(Key, Vec<u8>)]| {
        items.iter().map(|(_, data)| ITEM_SIZE + data.len()).sum::<usize>()
    };
    let larger = |cut: &usize| size(&items[..*cut]).max(size(&items[*cut..]));
    (1..items.len()).min_by_key(larger).filter(|cut| larger(cut) <= capacity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{KeyType, ObjectId};

    fn items(sizes: &[usize]) -> Vec<(Key, Vec<u8>)> {
        let key = |n| Key::new(ObjectId(300), KeyType::DIR_INDEX, n);
        sizes.iter().zip(2..).map(|(len, n)| (key(n), vec![n as u8; *len])).collect()
    }

    #[test]
    fn what_is_packed_comes_apart_again_without_gaps() {
        let mut node = vec![0xff; 4096];
        raw::header(&mut node).level = 0;
        let list = items(&[10, 0, 300, 1]);
        pack(&mut node, &list).unwrap();
        assert_eq!(unpack(&node).unwrap(), list);
        let view = NodeView(&node);
        let mut end = leaf_capacity(4096);
        for item in view.items() {
            assert_eq!((item.offset.get() + item.size.get()) as usize, end);
            end = item.offset.get() as usize;
        }
        assert_eq!(view.leaf_free(), leaf_capacity(4096) - 4 * ITEM_SIZE - 311);
    }

    #[test]
    fn two_leaves_share_what_is_too_much_for_one() {
        let full = leaf_capacity(4096);
        assert_eq!(balance(&items(&[1000, 1000, 1000, 1000, 1000]), 4096), Some(2));
        assert_eq!(balance(&items(&[full - ITEM_SIZE, full - ITEM_SIZE]), 4096), Some(1));
        assert_eq!(balance(&items(&[3000, 3000, 3000]), 4096), None);
        assert_eq!(balance(&items(&[10]), 4096), None);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut node = vec![0; 4096];
        let full = leaf_capacity(4096) - 2 * ITEM_SIZE;
        pack(&mut node, &items(&[full - 5, 5])).unwrap();
        let error = pack(&mut node, &items(&[full - 5, 6])).unwrap_err();
        assert!(error.to_string().contains("do not fit"), "{error}");
    }
}
