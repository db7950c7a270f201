//! Where on the picture a cell lies.
//!
//! On a Hilbert curve neighbours on the device are neighbours on the picture, so a range is a blob
//! whose area is its size, whatever the size of the device. Rows serve to read addresses.

use clap::ValueEnum;

/// How cells are put on the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Layout {
    /// Along a Hilbert curve, from the top left to the top right
    Hilbert,
    /// Line by line, from left to right
    Rows,
}

/// A square of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) layout: Layout,
    pub(super) side: u32,
}

impl Grid {
    /// A square of about so many cells.
    pub(super) fn new(layout: Layout, cells: u32) -> Self {
        let side = match layout {
            // The largest power of two whose square is no more.
            Layout::Hilbert => 1 << (cells.ilog2() / 2),
            Layout::Rows => cells.isqrt(),
        };
        Self { layout, side: side.max(1) }
    }

    pub(super) fn cells(self) -> u32 {
        self.side * self.side
    }

    /// Column and line of a cell.
    pub(super) fn place(self, cell: u32) -> (u32, u32) {
        match self.layout {
            Layout::Rows => (cell % self.side, cell / self.side),
            Layout::Hilbert => {
                let (mut x, mut y, mut rest, mut size) = (0, 0, cell, 1);
                while size < self.side {
                    let right = (rest / 2) & 1;
                    let down = (rest ^ right) & 1;
                    if down == 0 {
                        if right == 1 {
                            (x, y) = (size - 1 - x, size - 1 - y);
                        }
                        std::mem::swap(&mut x, &mut y);
                    }
                    x += size * right;
                    y += size * down;
                    rest /= 4;
                    size *= 2;
                }
                (x, y)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_curve_visits_every_place_once_and_never_jumps() {
        for side in [1u32, 2, 4, 32, 128] {
            let grid = Grid::new(Layout::Hilbert, side * side);
            assert_eq!(grid.side, side);
            let places: Vec<(u32, u32)> = (0..grid.cells()).map(|c| grid.place(c)).collect();
            assert_eq!(places.iter().collect::<BTreeSet<_>>().len(), grid.cells() as usize);
            assert!(
                places.windows(2).all(|w| w[0].0.abs_diff(w[1].0) + w[0].1.abs_diff(w[1].1) == 1)
            );
            assert_eq!(places[0], (0, 0));
            assert_eq!(places[places.len() - 1], (side - 1, 0));
        }
    }

    #[test]
    fn rows_fill_a_square() {
        let grid = Grid::new(Layout::Rows, 10_000);
        assert_eq!((grid.side, grid.place(0), grid.place(101)), (100, (0, 0), (1, 1)));
        assert_eq!(Grid::new(Layout::Hilbert, 10_000).side, 64);
    }
}
