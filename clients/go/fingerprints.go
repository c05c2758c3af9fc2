package penstock

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// fingerprint is a message as bytes that are the same in every language, which protobuf's own form is not: the set fields by
// their numbers, each as NUMBER:LENGTH:VALUE, one for each item of a list. A text is its UTF-8, an integer, a truth value and
// an enum's number its decimal form, a real number its eight bytes, the highest first, a message its fingerprint. An entry of a
// map is a message of its key (1) and its value (2), both always there; entries are in the order of their bytes.
func fingerprint(message protoreflect.Message) []byte {
	var fields []protoreflect.FieldDescriptor
	message.Range(func(field protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		fields = append(fields, field)
		return true
	})
	slices.SortFunc(fields, func(one, other protoreflect.FieldDescriptor) int { return int(one.Number() - other.Number()) })
	var made []byte
	for _, field := range fields {
		value, number := message.Get(field), int(field.Number())
		switch {
		case field.IsMap():
			var entries [][]byte
			value.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
				entry := printed(nil, 1, printedValue(field.MapKey(), key.Value()))
				entries = append(entries, printed(nil, number, printed(entry, 2, printedValue(field.MapValue(), value))))
				return true
			})
			slices.SortFunc(entries, bytes.Compare)
			made = append(made, bytes.Join(entries, nil)...)
		case field.IsList():
			for i := range value.List().Len() {
				made = printed(made, number, printedValue(field, value.List().Get(i)))
			}
		default:
			made = printed(made, number, printedValue(field, value))
		}
	}
	return made
}

func printed(to []byte, number int, value []byte) []byte {
	return append(fmt.Appendf(to, "%d:%d:", number, len(value)), value...)
}

func printedValue(field protoreflect.FieldDescriptor, value protoreflect.Value) []byte {
	switch field.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return fingerprint(value.Message())
	case protoreflect.BytesKind:
		return value.Bytes()
	case protoreflect.StringKind:
		return []byte(value.String())
	case protoreflect.DoubleKind, protoreflect.FloatKind:
		return binary.BigEndian.AppendUint64(nil, math.Float64bits(value.Float()))
	case protoreflect.EnumKind:
		return strconv.AppendInt(nil, int64(value.Enum()), 10)
	case protoreflect.BoolKind:
		if value.Bool() {
			return []byte("1")
		}
		return []byte("0")
	default: // the integers
		return []byte(value.String())
	}
}
