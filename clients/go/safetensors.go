package penstock

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"strings"
)

// chunkBytes is the protocol's largest chunk of a push.
const chunkBytes = 1 << 20

// dtypeBytes are the dtypes that can be pushed, as safetensors names them, and the bytes of one value.
var dtypeBytes = map[string]int64{
	"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}

// Tensor is a tensor as safetensors has it: its name, its dtype (F32, BF16, ...), its shape, and its values, little-endian
// and in row-major order. Data is not copied: leave it as it is until the push has ended.
type Tensor struct {
	Name  string
	DType string
	Shape []int64
	Data  []byte
}

// Float32Tensor is a tensor of float32 values.
func Float32Tensor(name string, shape []int64, values []float32) Tensor {
	return Tensor{Name: name, DType: "F32", Shape: shape, Data: EncodeLogprobs(values)}
}

// tensorFile is a safetensors file in memory: its header and its tensors.
type tensorFile struct {
	pieces [][]byte
	size   int64
	sha256 []byte
}

// layOut writes the header and hashes the whole file.
func layOut(tensors []Tensor) (*tensorFile, error) {
	if len(tensors) == 0 {
		return nil, &Error{Kind: ErrInvalidArgument, Reason: "NO_TENSORS", Message: "There are no tensors to push"}
	}
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	entries, offset, file := map[string]entry{}, int64(0), &tensorFile{pieces: make([][]byte, 1, len(tensors)+1)}
	for _, tensor := range tensors {
		bytes, known := dtypeBytes[tensor.DType]
		if !known {
			return nil, &Error{
				Kind: ErrInvalidArgument, Reason: "TENSOR_DTYPE",
				Message: fmt.Sprintf("%s has dtype %q, which cannot be pushed", tensor.Name, tensor.DType),
			}
		}
		for _, length := range tensor.Shape {
			bytes *= length
		}
		if int64(len(tensor.Data)) != bytes {
			return nil, &Error{
				Kind: ErrInvalidArgument, Reason: "TENSOR_SIZE",
				Message: fmt.Sprintf("%s has %d bytes; its shape needs %d", tensor.Name, len(tensor.Data), bytes),
			}
		}
		shape := tensor.Shape
		if shape == nil {
			shape = []int64{}
		}
		entries[tensor.Name] = entry{tensor.DType, shape, [2]int64{offset, offset + bytes}}
		offset += bytes
		file.pieces = append(file.pieces, tensor.Data)
	}
	text, err := json.Marshal(entries)
	if err != nil {
		return nil, &Error{Kind: ErrInvalidArgument, Reason: "NOT_JSON", Message: err.Error(), cause: err}
	}
	text = append(text, strings.Repeat(" ", (8-len(text)%8)%8)...)
	if len(text) > math.MaxInt32 {
		return nil, &Error{Kind: ErrInvalidArgument, Reason: "TENSOR_SIZE", Message: "There are too many tensors"}
	}
	file.pieces[0] = append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	digest := sha256.New()
	for _, piece := range file.pieces {
		file.size += int64(len(piece))
		_, _ = digest.Write(piece) // it never fails
	}
	file.sha256 = digest.Sum(nil)
	return file, nil
}

// chunks yields the file in pieces of at most chunkBytes; nothing where there is no file.
func (f *tensorFile) chunks() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		if f == nil {
			return
		}
		buffer := make([]byte, 0, chunkBytes)
		for _, piece := range f.pieces {
			for len(piece) > 0 {
				taken := min(len(piece), chunkBytes-len(buffer))
				buffer, piece = append(buffer, piece[:taken]...), piece[taken:]
				if len(buffer) == chunkBytes {
					if !yield(buffer) {
						return
					}
					buffer = make([]byte, 0, chunkBytes) // the transport may still read the last one
				}
			}
		}
		if len(buffer) > 0 {
			yield(buffer)
		}
	}
}

func (f *tensorFile) digest() []byte {
	if f == nil {
		return nil
	}
	return f.sha256
}
