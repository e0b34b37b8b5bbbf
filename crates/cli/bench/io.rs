//! `wick bench io`: random reads of one file, by length, requests in flight, engine and way past the page cache.
//!
//! A cell of the table is [`ROUNDS`] rounds; the engines take turns within a row. Offsets are multiples of the
//! read's length, drawn over the whole file, without checksums. `in flight`, requests a second and processor time
//! are about the requests that the device gets, and a row says so where they are not the reads asked for: the
//! reader splits long reads, and lets close neighbours share a request.
//!
//! Not here: reads in order and the rates that bound a decode (`probe`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use candle_wick::{FlashFolder, HumanBytes, IoOptions, Memory};
use clap::{Args, ValueEnum};
use serde::Serialize;
use wick_io::{DirectIo, Engine, FlashFile, IoError, Reader};

use super::access::Access;
use super::plot::{Axis, Figure, Line, Mark, Panel, Scale};
use crate::args::{positive, seconds};
use crate::draw::Draw;
use crate::machine::Machine;
use crate::output;
use crate::read_load::{reader, Load, Sample, IN_FLIGHT_MAX};
use crate::spread::{Spread, ROUNDS};

/// Below this, few places are left to draw, and a device's own memory may hold them all.
const FILE_BYTES_MIN: u64 = 64 << 20;
/// What every direct read is a multiple of, wherever it runs.
const BLOCK_BYTES: u64 = 4096;
const READ_BYTES_MAX: u64 = 4 << 20;

#[derive(Args, Debug)]
pub(crate) struct IoArgs {
    /// File of at least 64 MiB, or a converted folder: then its largest record file
    #[arg(value_name = "PATH")]
    path: PathBuf,

    /// Lengths of a read, 4KiB to 4MiB
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = read_bytes,
        default_value = "4KiB,16KiB,32KiB,64KiB,128KiB,256KiB,1MiB,4MiB")]
    size: Vec<usize>,

    /// Most requests in flight, 1 to 64
    #[arg(long, value_name = "COUNT", value_delimiter = ',', value_parser = in_flight,
        default_value = "1,2,4,8,16,32,64")]
    in_flight: Vec<usize>,

    /// Who makes the requests
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "pool,io_uring"
    )]
    engine: Vec<EngineChoice>,

    /// Past the page cache, or through it
    #[arg(
        long,
        value_name = "MODE",
        value_delimiter = ',',
        value_parser = one_way,
        default_value = "direct,buffered"
    )]
    io: Vec<DirectIo>,

    /// Seconds that a cell of the table takes at least
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds)]
    seconds: f64,

    /// Folder for pictures of throughput by length, SVG and PNG: one for each engine and way of reading
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EngineChoice {
    Pool,
    #[value(name = "io_uring")]
    Uring,
}

fn read_bytes(text: &str) -> Result<usize, String> {
    match text.parse().map_err(|error| format!("{error}"))? {
        Memory::Bytes(bytes) if bytes.is_multiple_of(BLOCK_BYTES) && bytes <= READ_BYTES_MAX => {
            Ok(bytes as usize)
        }
        _ => Err("must be a multiple of 4KiB and at most 4MiB".to_owned()),
    }
}

fn in_flight(text: &str) -> Result<usize, String> {
    match positive(text)? {
        count if count > IN_FLIGHT_MAX => Err(format!("must be at most {IN_FLIGHT_MAX}")),
        count => Ok(count),
    }
}

/// `auto` is one of the two others, and which one is what a measurement has to say.
fn one_way(text: &str) -> Result<DirectIo, String> {
    match text.parse().map_err(|error| format!("{error}"))? {
        DirectIo::Preferred => Err("must be direct or buffered".to_owned()),
        way => Ok(way),
    }
}

/// What was measured, and how.
#[derive(Serialize)]
struct IoBench {
    file: String,
    file_bytes: u64,
    machine: Machine,
    rounds: usize,
    cell_seconds: f64,
    accesses: Vec<Access>,
    engines: Vec<String>,
    /// What was asked for and is not there.
    left_out: Vec<&'static str>,
    cells: Vec<Cell>,
}

/// Reads of one length by one engine.
#[derive(Serialize)]
struct Cell {
    /// Such as `direct/pool/16KiB/32`.
    name: String,
    io: &'static str,
    engine: String,
    read_bytes: usize,
    in_flight: usize,
    /// Mean length of the requests that the device got.
    request_bytes: f64,
    mb_per_s: Spread,
    requests_per_s: Spread,
    cpu_us_per_request: Spread,
}

pub(crate) fn run(args: &IoArgs) -> Result<ExitCode> {
    let path = measured_file(&args.path)?;
    let (accesses, engines, left_out) = available(args, &path)?;
    if let Some(out) = &args.out {
        fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    }
    let row_count = accesses.len() * args.size.len() * args.in_flight.len();
    let total_s = (row_count * engines.len()) as f64 * args.seconds;
    output::note(&format!(
        "{} cells of {} s: at least {:.0} s in all",
        row_count * engines.len(),
        args.seconds,
        total_s.ceil()
    ));
    let mut bench = IoBench {
        file: path.display().to_string(),
        file_bytes: accesses[0].file.len_bytes(),
        machine: Machine::this(),
        rounds: ROUNDS,
        cell_seconds: args.seconds,
        accesses,
        engines: engines.iter().map(Engine::to_string).collect(),
        left_out,
        cells: Vec::new(),
    };
    let say = |text: &str| {
        if args.json {
            Ok(())
        } else {
            output::print(text)
        }
    };
    say(&bench.head())?;
    for index in 0..bench.accesses.len() {
        say(&bench.table_head(index))?;
        for &read_bytes in &args.size {
            for &in_flight in &args.in_flight {
                let row = bench.row(index, &engines, read_bytes, in_flight)?;
                say(&table_row(&row))?;
                bench.cells.extend(row);
            }
        }
    }
    if args.json {
        output::print_json(&bench)?;
    }
    if let Some(out) = &args.out {
        for access in &bench.accesses {
            for engine in &bench.engines {
                let name = format!("io-{}-{engine}", access.io);
                bench.figure(access, engine).write(out, &name)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The file itself, or the largest record file of a converted folder.
fn measured_file(path: &Path) -> Result<PathBuf> {
    let path = if path.is_dir() {
        let folder = FlashFolder::open(path, IoOptions::default())?;
        let manifest = folder.manifest();
        let records = manifest
            .layers
            .iter()
            .filter_map(|layer| manifest.file(&layer.file));
        let largest = records.max_by_key(|file| file.size_bytes);
        let largest = largest.with_context(|| format!("{}: no record files", path.display()))?;
        path.join(&largest.name)
    } else {
        path.to_owned()
    };
    let file = FlashFile::open(&path, DirectIo::Off)?;
    ensure!(
        file.len_bytes() >= FILE_BYTES_MIN,
        "{}: {} are too few to measure random reads, which takes {}",
        path.display(),
        HumanBytes(file.len_bytes()),
        HumanBytes(FILE_BYTES_MIN)
    );
    Ok(path)
}

/// The ways to read the file and the engines that there are of those asked for, and what is missing.
fn available(args: &IoArgs, path: &Path) -> Result<(Vec<Access>, Vec<Engine>, Vec<&'static str>)> {
    let mut left_out = Vec::new();
    let mut accesses = Vec::new();
    for way in [DirectIo::Required, DirectIo::Off] {
        if args.io.contains(&way) {
            match Access::open(path, way) {
                Ok(access) => accesses.push(access),
                Err(error) if is_refusal(&error) => {
                    left_out.push("direct: the filesystem refuses it")
                }
                Err(error) => return Err(error),
            }
        }
    }
    let mut engines = Vec::new();
    if args.engine.contains(&EngineChoice::Pool) {
        engines.push(Engine::Pool);
    }
    if args.engine.contains(&EngineChoice::Uring) {
        match reader(Engine::Uring, 1)?.engine() {
            Engine::Uring => engines.push(Engine::Uring),
            _ => left_out.push("io_uring: the system has none, or does not allow it"),
        }
    }
    if accesses.is_empty() || engines.is_empty() {
        bail!("nothing to measure: {}", left_out.join("; "));
    }
    Ok((accesses, engines, left_out))
}

fn is_refusal(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(IoError::DirectRefused { .. }))
}

impl IoBench {
    /// One cell for each engine.
    fn row(
        &self,
        access: usize,
        engines: &[Engine],
        read_bytes: usize,
        in_flight: usize,
    ) -> Result<Vec<Cell>> {
        let access = &self.accesses[access];
        let places = access.file.len_bytes() / read_bytes as u64;
        let round = Duration::from_secs_f64(self.cell_seconds / ROUNDS as f64);
        let readers = engines.iter().map(|&engine| reader(engine, in_flight));
        let readers: Vec<Reader> = readers.collect::<Result<_>>()?;
        let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); readers.len()];
        let (mut load, mut draw) = (Load::new(&access.file, read_bytes, in_flight)?, Draw::new());
        for _ in 0..ROUNDS {
            for (reader, samples) in readers.iter().zip(&mut samples) {
                access.prepare();
                let next_offset = || draw.below(places) * read_bytes as u64;
                samples.push(load.run(reader, round, next_offset)?);
            }
        }
        let cells = engines.iter().zip(&samples).map(|(engine, samples)| {
            let spread = |figure: fn(&Sample) -> f64| Spread::of(samples.iter().map(figure));
            let bytes: u64 = samples.iter().map(|sample| sample.bytes).sum();
            let requests: u64 = samples.iter().map(|sample| sample.requests).sum();
            Cell {
                name: format!(
                    "{}/{engine}/{}/{in_flight}",
                    access.io,
                    size_name(read_bytes, "")
                ),
                io: access.io,
                engine: engine.to_string(),
                read_bytes,
                in_flight,
                request_bytes: bytes as f64 / requests.max(1) as f64,
                mb_per_s: spread(|sample| sample.bytes_per_s() / 1e6),
                requests_per_s: spread(Sample::requests_per_s),
                cpu_us_per_request: spread(Sample::processor_us_per_request),
            }
        });
        Ok(cells.collect())
    }

    /// Throughput by length, a line for each count in flight.
    fn figure(&self, access: &Access, engine: &str) -> Figure {
        let is_shown = |cell: &&Cell| cell.io == access.io && cell.engine == engine;
        let cells: Vec<&Cell> = self.cells.iter().filter(is_shown).collect();
        let mut counts: Vec<usize> = cells.iter().map(|cell| cell.in_flight).collect();
        counts.sort_unstable();
        counts.dedup();
        let line = |count: usize| {
            let cells = cells.iter().filter(|cell| cell.in_flight == count);
            let mark = |cell: &&Cell| Mark {
                x: cell.read_bytes as f64 / 1024.0,
                y: cell.mb_per_s.median,
                range: Some((cell.mb_per_s.min, cell.mb_per_s.max)),
            };
            let mut marks: Vec<Mark> = cells.map(mark).collect();
            marks.sort_by(|a, b| a.x.total_cmp(&b.x));
            Line {
                name: format!("{count} in flight"),
                marks,
            }
        };
        let rates = cells.iter().map(|cell| cell.mb_per_s.median);
        Figure {
            title: format!("Random reads, {}, {engine}", access.io),
            note: format!(
                "{}\nmedians of {} rounds (bars: min..max)",
                access.description(),
                self.rounds
            ),
            x: Axis::new("length of a read, KiB", Scale::Log2),
            panels: vec![Panel {
                y: Axis::new("MB/s", Scale::for_spread(rates)),
                lines: counts.into_iter().map(line).collect(),
            }],
        }
    }

    /// What is about to be measured, in sentences.
    fn head(&self) -> String {
        let left_out: String = self
            .left_out
            .iter()
            .map(|what| format!("left out  {what}\n"))
            .collect();
        format!(
            "file      {}, {}\nmachine   {}\nreads     at random multiples of their length over the whole file, \
             nothing checked; {} rounds in {} s a cell, engines by turns\n\
             figures   medians (least..most); MB = 10^6 bytes; \"us\" is processor time of a request\n{left_out}",
            self.file,
            HumanBytes(self.file_bytes),
            self.machine,
            self.rounds,
            self.cell_seconds
        )
    }

    fn table_head(&self, access: usize) -> String {
        let access = self.accesses[access].description();
        let columns =
            |engine: &String| format!(" {engine} MB/s | {engine} requests/s | {engine} us |");
        let columns: String = self.engines.iter().map(columns).collect();
        let rule = "---|".repeat(2 + 3 * self.engines.len());
        format!("\n{access}\n\n| read | in flight |{columns}\n|{rule}\n")
    }
}

/// The cells of one row, with what the reads became where that is something else.
fn table_row(cells: &[Cell]) -> String {
    let Some(first) = cells.first() else {
        return String::new();
    };
    let mut label = size_name(first.read_bytes, " ");
    let share = first.request_bytes / first.read_bytes as f64;
    if !(0.9..=1.1).contains(&share) {
        label += &format!(" as {}", HumanBytes(first.request_bytes as u64));
    }
    let figures = cells.iter().map(|cell| {
        let (rate, requests) = (cell.mb_per_s, cell.requests_per_s.median);
        format!(" {rate} | {requests:.0} | {:.1} |", cell.cpu_us_per_request)
    });
    format!(
        "| {label} | {} |{}\n",
        first.in_flight,
        figures.collect::<String>()
    )
}

/// A multiple of 4 KiB, such as `16KiB`.
fn size_name(bytes: usize, space: &str) -> String {
    if bytes.is_multiple_of(1 << 20) {
        format!("{}{space}MiB", bytes >> 20)
    } else {
        format!("{}{space}KiB", bytes >> 10)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        io: IoArgs,
    }

    fn parse(line: &str) -> Result<IoArgs, clap::Error> {
        let words = ["wick"].into_iter().chain(line.split_whitespace());
        Command::try_parse_from(words).map(|command| command.io)
    }

    #[test]
    fn the_grid_is_whole_unless_a_part_is_asked_for() {
        let all = parse("file").unwrap();
        assert_eq!(all.size.len(), 8);
        assert_eq!((all.size[0], all.size[7]), (4 << 10, 4 << 20));
        assert_eq!(all.in_flight, [1, 2, 4, 8, 16, 32, 64]);
        assert_eq!(all.engine, [EngineChoice::Pool, EngineChoice::Uring]);
        assert_eq!(all.io, [DirectIo::Required, DirectIo::Off]);
        let some =
            parse("file --size 16KiB,2MiB --in-flight 3 --engine io_uring --io direct").unwrap();
        assert_eq!(
            (some.size, some.in_flight),
            (vec![16 << 10, 2 << 20], vec![3])
        );
        assert_eq!(
            (some.engine, some.io),
            (vec![EngineChoice::Uring], vec![DirectIo::Required])
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for flags in [
            "--size 5000",
            "--size 8MiB",
            "--size 50%",
            "--size big",
            "--in-flight 0",
            "--in-flight 65",
            "--engine auto",
            "--io none",
            "--io auto",
            "--seconds 0",
            "--seconds nan",
        ] {
            assert!(parse(&format!("file {flags}")).is_err(), "{flags}");
        }
        assert!(parse("").is_err());
    }

    #[test]
    fn a_row_says_what_became_of_its_reads() {
        let spread = Spread::of([2.0]);
        let cell = |read_bytes, request_bytes| Cell {
            name: String::new(),
            io: "direct",
            engine: "pool".to_owned(),
            read_bytes,
            in_flight: 8,
            request_bytes,
            mb_per_s: spread,
            requests_per_s: spread,
            cpu_us_per_request: spread,
        };
        assert_eq!(
            table_row(&[cell(16 << 10, 16384.0)]),
            "| 16 KiB | 8 | 2 (2..2) | 2 | 2.0 (2.0..2.0) |\n"
        );
        let split = table_row(&[cell(4 << 20, 524_288.0)]);
        assert!(split.starts_with("| 4 MiB as 512.0 KiB | 8 |"), "{split}");
        assert_eq!(table_row(&[]), "");
    }
}
