//! What the daemon reports about itself: the JSON behind `larder stats` and `larder df`.

use super::Server;
use crate::control::{TEXT_LEN, hex};
use crate::handler::Failure;

impl Server {
    pub(super) fn stats_json(&self) -> serde_json::Value {
        serde_json::json!({
            "uptime_seconds": self.stats.age().as_secs_f64(),
            "requests": self.stats.to_json(),
            "mounts": self.mounts_json(),
            "engine": serde_json::to_value(self.fs.stats()).unwrap_or_default(),
            "memory": memory(),
            "sandbox": crate::sandbox::to_json(),
            "file_system": self.info_json(),
        })
    }

    /// The mounts of the file system, as many as the answer has room for.
    fn mounts_json(&self) -> serde_json::Value {
        const MOST: usize = 4096;
        let (mut all, mut len) = (Vec::new(), 0);
        for member in self.group.members() {
            let mountpoint = member.mountpoint().to_string_lossy().into_owned();
            len += mountpoint.len();
            if len <= MOST {
                let (read_only, subvolume) =
                    (member.is_read_only(), member.filesystem().root().subvol.0);
                all.push(serde_json::json!({
                    "mountpoint": mountpoint,
                    "subvolume": subvolume,
                    "read_only": read_only,
                }));
            }
        }
        all.into()
    }

    pub(super) fn df_json(&self) -> Result<serde_json::Value, Failure> {
        let space = self.fs.statfs()?;
        Ok(serde_json::json!({
            "total": space.total,
            "free": space.free,
            "available": space.available,
            "block_size": space.block_size,
            "space": serde_json::to_value(self.fs.space_usage()).unwrap_or_default(),
            "balance": serde_json::to_value(self.fs.balance_plan()).unwrap_or_default(),
            "file_system": self.info_json(),
        }))
    }

    /// The device with this place in the list; null behind the last one.
    pub(super) fn device_json(&self, n: u64) -> serde_json::Value {
        let devices = self.fs.devices();
        let device = usize::try_from(n).ok().and_then(|n| devices.get(n));
        serde_json::json!({
            "count": devices.len(),
            "device": serde_json::to_value(device).unwrap_or_default(),
        })
    }

    pub(super) fn info_json(&self) -> serde_json::Value {
        let info = self.fs.info();
        serde_json::json!({
            "fsid": hex(&info.fsid),
            "label": String::from_utf8_lossy(&info.label),
            "generation": info.generation.0,
            "nodesize": info.nodesize,
            "sectorsize": info.sectorsize,
            "checksum": info.csum.name(),
            "total_bytes": info.total_bytes,
            "bytes_used": info.bytes_used,
            "read_only": info.read_only,
            "has_unreplayed_log": info.has_unreplayed_log,
        })
    }
}

/// This process's memory, in bytes.
fn memory() -> serde_json::Value {
    let status = larder_proc::Status::own().ok();
    let bytes = |name| status.as_ref().and_then(|status| status.bytes(name));
    serde_json::json!({
        "anonymous": bytes("RssAnon"),
        "resident": bytes("VmRSS"),
        "peak": bytes("VmHWM"),
    })
}

/// JSON in the fixed length of an answer; an error in its place if it is too long.
pub(super) fn text(value: &serde_json::Value) -> Vec<u8> {
    let mut bytes = value.to_string().into_bytes();
    if bytes.len() >= TEXT_LEN {
        bytes = br#"{"error":"the answer is too long"}"#.to_vec();
    }
    bytes.resize(TEXT_LEN, 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_known() {
        assert!(memory()["anonymous"].as_u64() > Some(0), "{}", memory());
    }

    #[test]
    fn texts_have_one_length() {
        let short = text(&serde_json::json!({"a": 1}));
        assert_eq!((short.len(), &short[..8]), (TEXT_LEN, &b"{\"a\":1}\0"[..]));
        let long = text(&serde_json::json!("x".repeat(TEXT_LEN)));
        assert!(long.starts_with(b"{\"error\"") && long.len() == TEXT_LEN);
    }
}
