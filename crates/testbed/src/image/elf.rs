//! What a program's own header tells: for which machine it is, and whether it runs where nothing else is.

use anyhow::Context;

/// Of the header, in bytes from its start.
const MACHINE: usize = 18;
const SEGMENTS_AT: usize = 32;
const SEGMENT_SIZE: usize = 54;
const SEGMENT_COUNT: usize = 56;

/// A segment that names the loader of a dynamic program.
const INTERPRETER: u32 = 3;

/// The machine a static program is for, in the words of OCI.
///
/// # Errors
/// It is no static Linux program of a machine we know.
pub(super) fn architecture(program: &[u8]) -> anyhow::Result<&'static str> {
    anyhow::ensure!(program.starts_with(b"\x7fELF\x02\x01"), "not a 64-bit little-endian ELF file");
    let architecture = match u16::from_le_bytes(field(program, MACHINE)?) {
        62 => "amd64",
        183 => "arm64",
        other => anyhow::bail!("for a machine of unknown number {other}"),
    };
    let at = usize::try_from(u64::from_le_bytes(field(program, SEGMENTS_AT)?))?;
    let size = usize::from(u16::from_le_bytes(field(program, SEGMENT_SIZE)?));
    for segment in 0..usize::from(u16::from_le_bytes(field(program, SEGMENT_COUNT)?)) {
        let kind = u32::from_le_bytes(field(program, at + segment * size)?);
        anyhow::ensure!(kind != INTERPRETER, "not static: an image without a loader cannot run it");
    }
    Ok(architecture)
}

fn field<const N: usize>(program: &[u8], at: usize) -> anyhow::Result<[u8; N]> {
    let bytes = at.checked_add(N).and_then(|end| program.get(at..end)).context("cut short")?;
    Ok(bytes.try_into()?)
}

/// A program with nothing but a header and one segment of this kind.
#[cfg(test)]
pub(super) fn made_up(machine: u16, segment: u32) -> Vec<u8> {
    let mut program = vec![0; 68];
    program[..6].copy_from_slice(b"\x7fELF\x02\x01");
    program[MACHINE..][..2].copy_from_slice(&machine.to_le_bytes());
    program[SEGMENTS_AT] = 64;
    program[SEGMENT_SIZE] = 56;
    program[SEGMENT_COUNT] = 1;
    program[64..].copy_from_slice(&segment.to_le_bytes());
    program
}

#[cfg(test)]
mod tests {
    use super::{INTERPRETER, architecture, made_up};

    const LOADED: u32 = 1;

    #[test]
    fn a_static_program_tells_its_machine() {
        assert_eq!(architecture(&made_up(62, LOADED)).unwrap(), "amd64");
        assert_eq!(architecture(&made_up(183, LOADED)).unwrap(), "arm64");
    }

    #[test]
    fn what_could_not_run_in_the_image_is_refused() {
        let complaint = |program: &[u8]| architecture(program).unwrap_err().to_string();
        assert!(complaint(&made_up(62, INTERPRETER)).contains("not static"));
        assert!(complaint(&made_up(243, LOADED)).contains("243"));
        assert!(complaint(b"#!/bin/sh").contains("ELF"));
        assert!(complaint(&made_up(62, LOADED)[..66]).contains("cut short"));
    }
}
