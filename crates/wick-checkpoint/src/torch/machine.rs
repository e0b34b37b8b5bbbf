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
use super::{opcode as op, rebuild};
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
                op::STOP => self.pop().map(Some),
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
            op::PROTO => {
                let version = self.bytes.u8("a protocol version")?;
                if !(2..=5).contains(&version) {
                    return Err(format!("protocol {version}, expected 2 to 5").into());
                }
                Ok(())
            }
            // A frame is a promise to the reader's buffer.
            op::FRAME => Ok(self.bytes.u64("a frame length").map(drop)?),
            op::MARK | op::POP | op::POP_MARK | op::DUP => self.arrange(opcode),
            op::BINPUT | op::LONG_BINPUT | op::MEMOIZE | op::BINGET | op::LONG_BINGET => {
                self.remember(opcode)
            }
            op::EMPTY_LIST
            | op::LIST
            | op::EMPTY_TUPLE
            | op::TUPLE
            | op::TUPLE1..=op::TUPLE3
            | op::EMPTY_DICT
            | op::DICT
            | op::EMPTY_SET
            | op::FROZENSET => self.collect(opcode),
            op::APPEND | op::APPENDS | op::SETITEM | op::SETITEMS | op::ADDITEMS => {
                self.fill(opcode)
            }
            op::GLOBAL
            | op::STACK_GLOBAL
            | op::REDUCE
            | op::NEWOBJ
            | op::NEWOBJ_EX
            | op::BUILD
            | op::BINPERSID => self.call(opcode),
            other => Err(format!("opcode {other:#04x} is not one that weights need").into()),
        }
    }

    /// The opcodes that stand for a value.
    fn scalar(&mut self, opcode: u8) -> Result<Option<Value<'a>>, Stop> {
        let bytes = &mut self.bytes;
        Ok(Some(match opcode {
            op::NONE => Value::None,
            op::NEWTRUE => Value::Bool(true),
            op::NEWFALSE => Value::Bool(false),
            op::BININT => Value::Int(i32::from_le_bytes(bytes.array("a number")?).into()),
            op::BININT1 => Value::Int(bytes.u8("a number")?.into()),
            op::BININT2 => Value::Int(bytes.u16("a number")?.into()),
            op::LONG1 => {
                let len = bytes.u8("a number's length")?;
                integer(bytes.take("a number", len.into())?)
            }
            op::LONG4 => {
                let len = bytes.u32("a number's length")?;
                integer(bytes.take("a number", len.into())?)
            }
            op::BINFLOAT => bytes.take("a float", 8).map(|_| Value::Plain)?,
            op::BINUNICODE => {
                let len = bytes.u32("a string's length")?;
                self.text(len.into())?
            }
            op::SHORT_BINUNICODE => {
                let len = bytes.u8("a string's length")?;
                self.text(len.into())?
            }
            op::BINUNICODE8 => {
                let len = bytes.u64("a string's length")?;
                self.text(len)?
            }
            // The strings of Python 2, which wrote names so, and bytes; bytes are text too where
            // they can be, which nothing tells apart that matters here.
            op::SHORT_BINSTRING | op::SHORT_BINBYTES => {
                let len = bytes.u8("a string's length")?;
                text_or_plain(bytes.take("a string", len.into())?)
            }
            op::BINSTRING | op::BINBYTES => {
                let len = bytes.u32("a string's length")?;
                text_or_plain(bytes.take("a string", len.into())?)
            }
            op::BINBYTES8 | op::BYTEARRAY8 => {
                let len = bytes.u64("a string's length")?;
                bytes.take("a string", len).map(|_| Value::Plain)?
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
            op::MARK => {
                if self.marks.len() == STACK_MAX {
                    return Err(format!("more than {STACK_MAX} marks").into());
                }
                self.marks.push(self.stack.len());
            }
            op::POP if self.marks.last() == Some(&self.stack.len()) => drop(self.marks.pop()),
            op::POP => drop(self.pop()?),
            op::POP_MARK => drop(self.pop_to_mark()?),
            // DUP.
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
            op::BINPUT | op::BINGET => self.bytes.u8("a memo index")?.into(),
            op::LONG_BINPUT | op::LONG_BINGET => self.bytes.u32("a memo index")?,
            // MEMOIZE.
            _ => u32::try_from(self.memo.len()).map_err(|_| "a full memo")?,
        };
        if matches!(opcode, op::BINGET | op::LONG_BINGET) {
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
            op::EMPTY_LIST => Object::List(Vec::new()),
            op::LIST => Object::List(self.pop_to_mark()?),
            op::EMPTY_TUPLE => Object::Tuple(Vec::new()),
            op::TUPLE => Object::Tuple(self.pop_to_mark()?),
            op::TUPLE1..=op::TUPLE3 => {
                let count = usize::from(opcode - op::TUPLE1) + 1;
                Object::Tuple(self.pop_many(count)?)
            }
            op::EMPTY_DICT => Object::Dict(Vec::new()),
            op::DICT => {
                let items = self.pop_to_mark()?;
                Object::Dict(pairs(&items)?)
            }
            op::FROZENSET => {
                self.pop_to_mark()?;
                return self.push(Value::Plain);
            }
            // EMPTY_SET.
            _ => return self.push(Value::Plain),
        };
        let value = self.heap.add(object);
        self.push(value)
    }

    /// Adds to the list, dictionary or set on top.
    fn fill(&mut self, opcode: u8) -> Result<(), Stop> {
        let mut items = match opcode {
            op::APPEND => self.pop_many(1)?,
            op::SETITEM => self.pop_many(2)?,
            // APPENDS, SETITEMS, ADDITEMS.
            _ => self.pop_to_mark()?,
        };
        let to_list = matches!(opcode, op::APPEND | op::APPENDS);
        let to_dict = matches!(opcode, op::SETITEM | op::SETITEMS);
        let top = self.top()?;
        match (top, self.heap.get_mut(top)) {
            (_, Some(Object::List(list))) if to_list => list.append(&mut items),
            (_, Some(Object::Dict(dict))) if to_dict => dict.append(&mut pairs(&items)?),
            (Value::Opaque(_), _) => {}
            (Value::Plain, _) if opcode == op::ADDITEMS => {}
            _ => return Err(format!("adds items to {}", self.heap.describe(top)).into()),
        }
        Ok(())
    }

    /// Names, and what is done with them.
    fn call(&mut self, opcode: u8) -> Result<(), Stop> {
        let value = match opcode {
            op::GLOBAL => {
                let module = self.line()?;
                let name = self.line()?;
                self.heap.add_global(module, name)
            }
            op::STACK_GLOBAL => match self.pop_many(2)?[..] {
                [Value::Str(module), Value::Str(name)] => self.heap.add_global(module, name),
                _ => return Err("a name that is not made of strings".into()),
            },
            op::REDUCE => {
                let args = self.pop()?;
                let callee = self.pop()?;
                rebuild::call(&mut self.heap, callee, args)?
            }
            op::NEWOBJ => {
                let args = self.pop()?;
                let class = self.pop()?;
                self.object_of(class, args)?
            }
            op::NEWOBJ_EX => {
                let _named = self.pop()?;
                let args = self.pop()?;
                let class = self.pop()?;
                self.object_of(class, args)?
            }
            op::BUILD => {
                let state = self.pop()?;
                return self.set_state(state);
            }
            // BINPERSID.
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
