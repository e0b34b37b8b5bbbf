//! A pickle machine that computes values and does nothing else.
//!
//! A pickle is a program for a stack machine, and Python's runs whatever function it names. This
//! one knows the opcodes of protocols 2 to 5 that build values; functions are looked up in a fixed
//! list (`globals`) and the rest stays opaque.
//!
//! Limits: [`OPCODES_MAX`] opcodes and [`STACK_MAX`] values on the stack. No opcode makes more
//! than one object or stores more values than the stack lost, so that these bound the memory: at
//! most some hundred bytes an opcode, half a gigabyte in all. A value on the stack, in the memo or
//! in a list is a handle, so that doubling a list again and again doubles nothing.

use std::collections::HashMap;

use super::heap::{Heap, Object, Opaque, Value};
use super::rebuild;
use crate::bytes::Bytes;
use crate::CheckpointError;

/// A tensor takes some 35, so that a file may have 100,000.
const OPCODES_MAX: u32 = 1 << 22;

/// Picklers put at most a thousand values at a time on the stack, tuples apart.
const STACK_MAX: usize = 1 << 20;

/// Longest module or name.
const LINE_MAX: usize = 1 << 10;

/// The value of a pickle, and the objects that it refers to.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    pub(super) heap: Heap<'a>,
    pub(super) value: Value<'a>,
}

/// Runs one pickle, which starts at `bytes` and ends with its stop opcode.
pub(super) fn run<'a>(bytes: &mut Bytes<'a>) -> Result<Pickle<'a>, CheckpointError> {
    let mut machine = Machine {
        bytes: bytes.clone(),
        heap: Heap::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
    let value = machine.run()?;
    *bytes = machine.bytes;
    let heap = machine.heap;
    Ok(Pickle { heap, value })
}

struct Machine<'a> {
    bytes: Bytes<'a>,
    heap: Heap<'a>,
    stack: Vec<Value<'a>>,
    /// Heights of the stack at which marks lie.
    marks: Vec<usize>,
    memo: HashMap<u32, Value<'a>>,
}

/// What stops the machine: the file ends, or the opcode does something wrong.
enum Stop {
    File(CheckpointError),
    Opcode(String),
}

impl From<CheckpointError> for Stop {
    fn from(error: CheckpointError) -> Self {
        Self::File(error)
    }
}

impl From<String> for Stop {
    fn from(problem: String) -> Self {
        Self::Opcode(problem)
    }
}

impl From<&str> for Stop {
    fn from(problem: &str) -> Self {
        Self::Opcode(problem.into())
    }
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Value<'a>, CheckpointError> {
        for _ in 0..OPCODES_MAX {
            let offset_bytes = self.bytes.position();
            let opcode = self.bytes.u8("the next opcode of the pickle")?;
            let result = match opcode {
                b'.' => self.pop().map(Some),
                _ => self.step(opcode).map(|()| None),
            };
            match result {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => {}
                Err(Stop::File(error)) => return Err(error),
                Err(Stop::Opcode(problem)) => {
                    return Err(CheckpointError::Pickle {
                        offset_bytes,
                        problem,
                    })
                }
            }
        }
        Err(CheckpointError::Pickle {
            offset_bytes: self.bytes.position(),
            problem: format!("more than {OPCODES_MAX} opcodes"),
        })
    }

    fn step(&mut self, opcode: u8) -> Result<(), Stop> {
        if let Some(value) = self.scalar(opcode)? {
            return self.push(value);
        }
        match opcode {
            0x80 => {
                let version = self.bytes.u8("a protocol version")?;
                if !(2..=5).contains(&version) {
                    return Err(format!("protocol {version}, expected 2 to 5").into());
                }
                Ok(())
            }
            // A frame is a promise to the reader's buffer.
            0x95 => Ok(self.bytes.u64("a frame length").map(drop)?),
            b'(' | b'0' | b'1' | b'2' => self.arrange(opcode),
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.remember(opcode),
            b']' | b'l' | b')' | b't' | 0x85..=0x87 | b'}' | b'd' | 0x8f | 0x91 => {
                self.collect(opcode)
            }
            b'a' | b'e' | b's' | b'u' | 0x90 => self.fill(opcode),
            b'c' | 0x93 | b'R' | 0x81 | 0x92 | b'b' | b'Q' => self.call(opcode),
            other => Err(format!("opcode {other:#04x} is not one that weights need").into()),
        }
    }

    /// The opcodes that stand for a value.
    fn scalar(&mut self, opcode: u8) -> Result<Option<Value<'a>>, Stop> {
        let bytes = &mut self.bytes;
        let text = "a string";
        Ok(Some(match opcode {
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'J' => Value::Int(i32::from_le_bytes(bytes.array("a number")?).into()),
            b'K' => Value::Int(bytes.u8("a number")?.into()),
            b'M' => Value::Int(bytes.u16("a number")?.into()),
            0x8a => {
                let len = bytes.u8("a number's length")?;
                integer(bytes.take("a number", len.into())?)
            }
            0x8b => {
                let len = bytes.u32("a number's length")?;
                integer(bytes.take("a number", len.into())?)
            }
            b'G' => bytes.take("a float", 8).map(|_| Value::Plain)?,
            b'X' => {
                let len = bytes.u32("a string's length")?;
                self.text(len.into())?
            }
            0x8c => {
                let len = bytes.u8("a string's length")?;
                self.text(len.into())?
            }
            0x8d => {
                let len = bytes.u64("a string's length")?;
                self.text(len)?
            }
            // The strings of Python 2, which wrote names so, and bytes; bytes are text too where
            // they can be, which nothing tells apart that matters here.
            b'U' | b'C' => {
                let len = bytes.u8("a string's length")?;
                text_or_plain(bytes.take(text, len.into())?)
            }
            b'T' | b'B' => {
                let len = bytes.u32("a string's length")?;
                text_or_plain(bytes.take(text, len.into())?)
            }
            0x8e | 0x96 => {
                let len = bytes.u64("a string's length")?;
                bytes.take(text, len).map(|_| Value::Plain)?
            }
            _ => return Ok(None),
        }))
    }

    fn text(&mut self, len: u64) -> Result<Value<'a>, Stop> {
        let bytes = self.bytes.take("a string", len)?;
        // Python also writes lone surrogates, which no tensor's name has.
        Ok(text_or_plain(bytes))
    }

    /// Marks, pops and copies.
    fn arrange(&mut self, opcode: u8) -> Result<(), Stop> {
        match opcode {
            b'(' => {
                if self.marks.len() == STACK_MAX {
                    return Err(format!("more than {STACK_MAX} marks").into());
                }
                self.marks.push(self.stack.len());
            }
            b'0' if self.marks.last() == Some(&self.stack.len()) => drop(self.marks.pop()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_to_mark()?),
            _ => {
                let top = self.top()?;
                self.push(top)?;
            }
        }
        Ok(())
    }

    /// Writes and reads the memo.
    fn remember(&mut self, opcode: u8) -> Result<(), Stop> {
        let index = match opcode {
            b'q' | b'h' => self.bytes.u8("a memo index")?.into(),
            b'r' | b'j' => self.bytes.u32("a memo index")?,
            _ => u32::try_from(self.memo.len()).map_err(|_| "a full memo")?,
        };
        if matches!(opcode, b'h' | b'j') {
            let value = self.memo.get(&index).copied();
            return self.push(value.ok_or_else(|| format!("nothing under memo index {index}"))?);
        }
        let top = self.top()?;
        self.memo.insert(index, top);
        Ok(())
    }

    /// Makes lists, tuples, dictionaries and sets.
    fn collect(&mut self, opcode: u8) -> Result<(), Stop> {
        let object = match opcode {
            b']' => Object::List(Vec::new()),
            b'l' => Object::List(self.pop_to_mark()?),
            b')' => Object::Tuple(Vec::new()),
            b't' => Object::Tuple(self.pop_to_mark()?),
            0x85..=0x87 => Object::Tuple(self.pop_many(usize::from(opcode - 0x84))?),
            b'}' => Object::Dict(Vec::new()),
            b'd' => {
                let items = self.pop_to_mark()?;
                Object::Dict(pairs(&items)?)
            }
            0x91 => {
                self.pop_to_mark()?;
                return self.push(Value::Plain);
            }
            _ => return self.push(Value::Plain),
        };
        let value = self.heap.add(object);
        self.push(value)
    }

    /// Adds to the list, dictionary or set on top.
    fn fill(&mut self, opcode: u8) -> Result<(), Stop> {
        let mut items = match opcode {
            b'a' => self.pop_many(1)?,
            b's' => self.pop_many(2)?,
            _ => self.pop_to_mark()?,
        };
        let to_list = matches!(opcode, b'a' | b'e');
        let to_dict = matches!(opcode, b's' | b'u');
        let top = self.top()?;
        match (top, self.heap.get_mut(top)) {
            (_, Some(Object::List(list))) if to_list => list.append(&mut items),
            (_, Some(Object::Dict(dict))) if to_dict => dict.append(&mut pairs(&items)?),
            (Value::Opaque(_), _) => {}
            (Value::Plain, _) if opcode == 0x90 => {}
            _ => return Err(format!("adds items to {}", self.heap.describe(top)).into()),
        }
        Ok(())
    }

    /// Names, and what is done with them.
    fn call(&mut self, opcode: u8) -> Result<(), Stop> {
        let value = match opcode {
            b'c' => {
                let module = self.line()?;
                let name = self.line()?;
                self.heap.add_global(module, name)
            }
            0x93 => match self.pop_many(2)?[..] {
                [Value::Str(module), Value::Str(name)] => self.heap.add_global(module, name),
                _ => return Err("a name that is not made of strings".into()),
            },
            b'R' => {
                let args = self.pop()?;
                let callee = self.pop()?;
                rebuild::call(&mut self.heap, callee, args)?
            }
            0x81 => {
                let args = self.pop()?;
                let class = self.pop()?;
                self.object_of(class, args)?
            }
            0x92 => {
                let _named = self.pop()?;
                let args = self.pop()?;
                let class = self.pop()?;
                self.object_of(class, args)?
            }
            b'b' => {
                let state = self.pop()?;
                return self.set_state(state);
            }
            _ => {
                let id = self.pop()?;
                rebuild::persistent(&mut self.heap, id)?
            }
        };
        self.push(value)
    }

    /// An object of a class. Classes whose objects are known here are called as functions are.
    fn object_of(&mut self, class: Value<'a>, args: Value<'a>) -> Result<Value<'a>, Stop> {
        let made = rebuild::call(&mut self.heap, class, args)?;
        Ok(match (class, made) {
            (Value::Global(_), Value::Opaque(opaque)) => Value::Opaque(Opaque {
                called: false,
                ..opaque
            }),
            (_, made) => made,
        })
    }

    /// Attributes of the object on top: those of a dictionary or of a tensor are of no use here.
    fn set_state(&mut self, state: Value<'a>) -> Result<(), Stop> {
        let top = self.top()?;
        let harmless = match self.heap.get(top) {
            None => matches!(top, Value::Opaque(_)),
            Some(Object::Dict(_)) => true,
            // A tuple would be other contents for the tensor.
            Some(Object::Tensor(_)) => self.heap.dict(state).is_some(),
            Some(_) => false,
        };
        if harmless {
            return Ok(());
        }
        let (state, top) = (self.heap.describe(state), self.heap.describe(top));
        Err(format!("sets the state of {top} to {state}").into())
    }

    fn push(&mut self, value: Value<'a>) -> Result<(), Stop> {
        if self.stack.len() == STACK_MAX {
            return Err(format!("more than {STACK_MAX} values on the stack").into());
        }
        self.stack.push(value);
        Ok(())
    }

    /// How many values lie above the last mark.
    fn height(&self) -> usize {
        self.stack.len() - self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<Value<'a>, Stop> {
        match self.stack.last() {
            Some(&value) if self.height() > 0 => Ok(value),
            _ => Err("needs a value where the stack has none".into()),
        }
    }

    fn pop(&mut self) -> Result<Value<'a>, Stop> {
        let value = self.top()?;
        self.stack.pop();
        Ok(value)
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<Value<'a>>, Stop> {
        if self.height() < count {
            return Err(format!("needs {count} values, the stack has {}", self.height()).into());
        }
        Ok(self.stack.split_off(self.stack.len() - count))
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value<'a>>, Stop> {
        let mark = self.marks.pop().ok_or("needs a mark where there is none")?;
        Ok(self.stack.split_off(mark))
    }

    fn line(&mut self) -> Result<&'a str, Stop> {
        let rest = self.bytes.rest();
        let end = rest.iter().take(LINE_MAX).position(|&byte| byte == b'\n');
        if end.is_none() && rest.len() >= LINE_MAX {
            return Err("a name without an end".into());
        }
        let end = end.unwrap_or(rest.len()); // then the line break is missing
        let line = self.bytes.take("a name", end as u64 + 1)?;
        Ok(std::str::from_utf8(&line[..end]).map_err(|_| "a name that is not UTF-8")?)
    }
}

fn pairs<'a>(items: &[Value<'a>]) -> Result<Vec<(Value<'a>, Value<'a>)>, Stop> {
    if !items.len().is_multiple_of(2) {
        return Err("a key without a value".into());
    }
    Ok(items
        .chunks_exact(2)
        .map(|pair| (pair[0], pair[1]))
        .collect())
}

fn text_or_plain(bytes: &[u8]) -> Value<'_> {
    std::str::from_utf8(bytes).map_or(Value::Plain, Value::Str)
}

/// An integer in two's complement, of any length.
fn integer(bytes: &[u8]) -> Value<'_> {
    if bytes.len() > 8 {
        return Value::LongInt(bytes);
    }
    let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let mut wide = if negative { [0xff; 8] } else { [0; 8] };
    wide[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(wide))
}
