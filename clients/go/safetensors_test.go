package penstock

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"testing"
)

func TestTensorsAreLaidOutAsOneSafetensorsFile(t *testing.T) {
	large := Tensor{Name: "b", DType: "U8", Shape: []int64{chunkBytes + 3}, Data: make([]byte, chunkBytes+3)}
	file, err := layOut([]Tensor{Float32Tensor("a", []int64{2}, []float32{1, -2}), large, {Name: "none", DType: "I8", Shape: []int64{0}}})
	if err != nil {
		t.Fatal(err)
	}
	var whole []byte
	for chunk := range file.chunks() {
		if len(chunk) > chunkBytes {
			t.Errorf("a chunk has %d bytes", len(chunk))
		}
		whole = append(whole, chunk...)
	}
	digest := sha256.Sum256(whole)
	if int64(len(whole)) != file.size || !bytes.Equal(digest[:], file.sha256) {
		t.Error("size or digest are not the file's")
	}
	length := binary.LittleEndian.Uint64(whole)
	var header map[string]struct {
		DType   string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	if err := json.Unmarshal(whole[8:8+length], &header); err != nil || length%8 != 0 {
		t.Fatal("the header is none:", err, length)
	}
	if at := header["a"].Offsets; at != [2]int64{0, 8} || !bytes.Equal(whole[8+length:16+length], EncodeLogprobs([]float32{1, -2})) {
		t.Error("the first tensor is elsewhere:", at)
	}
	if header["none"].Offsets[0] != chunkBytes+11 {
		t.Error("an empty tensor has a place:", header["none"])
	}
}

func TestTensorsThatCannotBePushedAreNamed(t *testing.T) {
	for reason, tensors := range map[string][]Tensor{
		"NO_TENSORS":   nil,
		"TENSOR_DTYPE": {{Name: "a", DType: "COMPLEX"}},
		"TENSOR_SIZE":  {{Name: "a", DType: "F32", Shape: []int64{2}, Data: make([]byte, 4)}},
	} {
		var failure *Error
		if _, err := layOut(tensors); !errors.As(err, &failure) || failure.Reason != reason {
			t.Errorf("%v is not %s", err, reason)
		}
	}
}
