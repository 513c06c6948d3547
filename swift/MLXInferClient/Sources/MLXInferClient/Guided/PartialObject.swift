/// An object while it is written: the properties of its type, nil until they have begun.
///
/// A property never changes once it is whole. Before, a text grows at its end, a list gets more elements, and an object more
/// properties; numbers, truth values and the cases of enumerations appear when they are whole.
///
/// ```swift
/// for try await snapshot in client.stream(Trip.self, "A weekend in Rome") {
///     print(snapshot.content.city ?? "", snapshot.content.notes ?? [])
/// }
/// ```
@dynamicMemberLookup
public struct PartialObject<Value: GuidedObject>: Sendable, Hashable {
    /// The object as JSON.
    public let json: PartialJSONValue

    /// A property so far; nil if it has not begun, or too little of it is there.
    public subscript<Field: JSONSchemaProviding>(dynamicMember path: KeyPath<Value, Field>) -> Field.PartiallyGenerated? {
        member(at: path).flatMap { Field.partiallyGenerated(from: $0) }
    }

    /// An optional property so far; nil if it has not begun, is null, or too little of it is there.
    public subscript<Field: JSONSchemaProviding>(dynamicMember path: KeyPath<Value, Field?>) -> Field.PartiallyGenerated? {
        member(at: path).flatMap { Field.partiallyGenerated(from: $0) }
    }

    private func member(at path: PartialKeyPath<Value>) -> PartialJSONValue? {
        Value.properties.first { $0.path == path }.flatMap { json.member($0.name) }
    }
}
