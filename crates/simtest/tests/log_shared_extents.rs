//! Files that share extents made in the running transaction, and logs: whatever a log has of one of them, it has their
//! checksums, and nothing in it contradicts what it has of the others.
//!
//! Each operation is one transaction's here as on a mount: the simulation's habit of committing between the steps of a
//! clone would leave nothing new to share.

use larder_fs::{OpenOptions, Tuning};
use larder_simtest::crash::Limits;
use larder_simtest::judge::Depth;
use larder_simtest::oracle::{Need, need};
use larder_simtest::runner::{Config, Outcome, run};
use larder_simtest::workload::Workload;

/// A data chunk that the last commit has: without one every `fsync` of data commits.
const BEGIN: &str = "new z; z[0,64K)=Z; COMMIT; ";

fn config() -> Config {
    let mut config = Config::new(1).expect("a new file system");
    let tuning = Tuning { commit_steps: false, seal_ahead: None, ..config.options.tuning };
    config.options = OpenOptions { tuning, ..config.options };
    config.limits = Limits { samples: 8, seed: 1, ..Limits::default() };
    config.max_states = 60;
    config.depth = Depth { emptied: 0.1, recovered: 0.1, checked: 0.3, kernel: 0.2 };
    if !need(&[Need::BtrfsProgs, Need::KernelBtrfs]) {
        config.depth = Depth { checked: 0.0, kernel: 0.0, ..config.depth };
    }
    config
}

/// Clones of what has just been written, synced on either side, in every order.
const SEQUENTIAL: &[(&str, &str)] = &[
    ("both", "new f; new g; f[0,1M)=A; copy f[0,1M)>g@0; F f; F g"),
    ("target first", "new f; new g; f[0,1M)=A; copy f[64K,256K)>g@1M; F g; F f"),
    (
        "one by one",
        "new f; new g; f[0,256K)=A; F f; copy f[0,256K)>g@0; F g; f[64K,128K)=B; F f; copy f[0,256K)>g@0; F g",
    ),
    // Extents that were written back together, and have become somebody else's one by one.
    ("a part", "new f; new g; new h; f[0,4K)=A; f[8K,12K)=B; copy f[0,12K)>h@0; copy f[8K,12K)>g@0; F g"),
    ("what is left", "new f; new h; f[0,4K)=A; f[8K,12K)=B; copy f[0,12K)>h@0; rm h; f[0,4K)=C; F f"),
    (
        "what is left, punched",
        "new f; new h; f[0,4K)=A; f[8K,12K)=B; copy f[0,12K)>h@0; punch f[0,4K); F f; F h",
    ),
    // Extents that could grow, had a log not been told of them.
    ("grown", "new f; new g; f[0,512K)=A; F f; f[512K,1M)=B; copy f[0,1M)>g@0; F g"),
    ("grown, both", "new f; new g; f[0,512K)=A; F f; f[512K,1M)=B; copy f[0,1M)>g@0; F g; F f; rm f; F g"),
    (
        "grown when alone again",
        "new f; new g; f[0,512K)=A; copy f[0,512K)>g@0; F g; rm g; f[512K,1M)=B; F f; f[1M,2M)=C; F f",
    ),
    ("grown in the target", "new f; new g; f[0,512K)=A; copy f[0,512K)>g@0; F f; rm f; g[512K,1M)=B; F g"),
];

#[test]
fn what_is_cloned_and_synced_has_its_checksums() {
    let config = config();
    let mut outcome = Outcome::default();
    for (name, text) in SEQUENTIAL {
        let one = run(&config, &Workload::script(*name, &format!("{BEGIN}{text}")).expect("a workload"));
        println!("{name}: {one}");
        outcome.add(one);
    }
    outcome.assert_sound();
}
