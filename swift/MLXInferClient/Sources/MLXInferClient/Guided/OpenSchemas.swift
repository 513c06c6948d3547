/// The types whose schemas are being made, so that a type that contains itself is made once.
final class OpenSchemas: Sendable {
    private struct Types {
        var open: Set<ObjectIdentifier> = []
        var recursive: Set<ObjectIdentifier> = []
    }

    @TaskLocal private static var current: OpenSchemas?
    private let types = Locked(Types())

    /// The schema of a type's properties; inside of itself, a reference to the definition that the outermost one carries.
    static func schema<Root: GuidedObject>(of type: Root.Type) -> JSONSchema {
        guard let current else { return $current.withValue(OpenSchemas()) { schema(of: type) } }
        return current.schema(of: type)
    }

    private func schema<Root: GuidedObject>(of type: Root.Type) -> JSONSchema {
        let (name, id) = (ResponseFormat.name(of: type), ObjectIdentifier(type))
        let reference = JSONValue.string("#/$defs/\(name)")
        let isInside = types.withLock { types in
            if types.open.contains(id) { types.recursive.insert(id) }
            return !types.open.insert(id).inserted
        }
        guard !isInside else { return ["$ref": reference] }
        let schema = JSONSchema.object(Root.properties)
        let isRecursive = types.withLock { types in
            types.open.remove(id)
            return types.recursive.remove(id) != nil
        }
        return isRecursive ? ["$ref": reference, "$defs": [name: schema.json]] : schema
    }
}
