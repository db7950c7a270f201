//! Licences of everything that is linked: asked of `cargo metadata`, compared with the allow-list
//! in `deny.toml`.
//!
//! The list stays in the form that cargo-deny reads, so that either tool gives the same answer;
//! this one needs nothing but Cargo.

use crate::spdx;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

/// One line per package whose licence is missing, cannot be read, or is not allowed.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let deny = std::fs::read_to_string(root.join("deny.toml")).context("deny.toml")?;
    let allowed = allow_list(&deny).context("deny.toml has no [licenses] allow list")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root)
        .output()?;
    ensure!(out.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    Ok(packages.iter().filter_map(|p| judge(p, &allowed)).collect())
}

fn judge(package: &serde_json::Value, allowed: &[String]) -> Option<String> {
    let name = format!("{} {}", package["name"].as_str()?, package["version"].as_str()?);
    let Some(expression) = package["license"].as_str() else {
        return Some(format!("{name}: states no licence"));
    };
    match spdx::is_satisfied(expression, &|l| allowed.iter().any(|a| a == l)) {
        Ok(true) => None,
        Ok(false) => Some(format!("{name}: licence {expression:?} is not in deny.toml's list")),
        Err(e) => Some(format!("{name}: licence {expression:?}: {e}")),
    }
}

/// The strings of `allow = [ … ]` in the section `[licenses]`.
fn allow_list(deny: &str) -> Option<Vec<String>> {
    let (_, section) = deny.split_once("[licenses]")?;
    let section = section.split("\n[").next()?;
    let (_, list) = section.split_once("allow = [")?;
    let (list, _) = list.split_once(']')?;
    Some(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_list_is_read_from_its_section_only() {
        let deny = "[bans]\nallow = [\"x\"]\n[licenses]\nallow = [\n  \"MIT\",\n  \"A WITH \
            B\"\n]\n[sources]\n";
        assert_eq!(allow_list(deny).unwrap(), ["MIT", "A WITH B"]);
        assert_eq!(allow_list("[bans]\nallow = [\"x\"]\n"), None);
    }

    #[test]
    fn a_package_is_named_with_what_is_wrong() {
        let allowed = ["MIT".to_owned()];
        let package = |licence: serde_json::Value| {
            let version = "1.0.0";
            json!({ "name": "p", "version": version, "license": licence })
        };
        assert_eq!(judge(&package("MIT".into()), &allowed), None);
        assert!(
            judge(&package("GPL-3.0-only".into()), &allowed)
                .unwrap()
                .contains("p 1.0.0: licence \"GPL-3.0-only\"")
        );
        assert!(
            judge(&package(serde_json::Value::Null), &allowed)
                .unwrap()
                .contains("states no licence")
        );
        assert!(judge(&package("MIT AND".into()), &allowed).is_some());
    }
}
