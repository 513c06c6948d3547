extension JSONValue {
    /// The JSON Schema with properties in the order that `x-order` gives, as models write them, and with every definition in `$defs` of the
    /// root, where references of the form `#/$defs/Name` look.
    ///
    /// Apple's FoundationModels and AnyLanguageModel encode their schemas with `x-order`, since JSON's objects have no order. Definitions
    /// of the same name that differ get a number.
    public func schemaForRequest() -> JSONValue {
        var definitions = HoistedDefinitions()
        guard case .object(var root) = definitions.rewritten(self, renamed: [:]) else { return self }
        root["$defs"] = definitions.found.keys.isEmpty ? nil : .object(definitions.found)
        return .object(root)
    }
}

/// The definitions of a schema, collected from all its levels.
private struct HoistedDefinitions {
    private(set) var found = JSONObject()

    /// Members whose values are not schemas.
    private static let data: Set<String> = ["const", "enum", "default", "examples", "required"]
    /// Members whose values are objects of schemas.
    private static let named: Set<String> = ["properties", "patternProperties", "dependentSchemas"]
    private static let prefix = "#/$defs/"

    /// A schema without its definitions. `renamed`: new names of definitions, by the names that references here use.
    mutating func rewritten(_ schema: JSONValue, renamed outer: [String: String]) -> JSONValue {
        switch schema {
        case .array(let schemas): return .array(schemas.map { rewritten($0, renamed: outer) })
        case .object(var object):
            let renamed = take(object["$defs"], renamed: outer)
            let order = object["x-order"]
            (object["$defs"], object["x-order"]) = (nil, nil)
            for (key, value) in object.members { object[key] = member(key, value, renamed) }
            if case .object(let properties) = object["properties"] { object["properties"] = .object(properties.ordered(by: order)) }
            return .object(object)
        default: return schema
        }
    }

    private mutating func member(_ key: String, _ value: JSONValue, _ renamed: [String: String]) -> JSONValue {
        if Self.data.contains(key) { return value }
        if key == "$ref", case .string(let target) = value, target.hasPrefix(Self.prefix) {
            let name = String(target.dropFirst(Self.prefix.count))
            return .string(Self.prefix + (renamed[name] ?? name))
        }
        if Self.named.contains(key), case .object(let schemas) = value {
            return .object(JSONObject(schemas.members.map { ($0.key, rewritten($0.value, renamed: renamed)) }))
        }
        return rewritten(value, renamed: renamed)
    }

    /// Adds definitions to those of the root, and returns the names under which they are there.
    private mutating func take(_ definitions: JSONValue?, renamed outer: [String: String]) -> [String: String] {
        guard case .object(let definitions) = definitions else { return outer }
        var renamed = outer
        for name in definitions.keys { renamed[name] = freeName(name, for: definitions[name]) }
        for (name, schema) in definitions.members {
            guard let place = renamed[name] else { continue }
            originals[place] = schema
            found[place] = .null  // the place, before the definitions that this one has
            found[place] = rewritten(schema, renamed: renamed)
        }
        return renamed
    }

    private var originals: [String: JSONValue] = [:]

    /// The name itself, unless a different definition has it.
    private func freeName(_ name: String, for schema: JSONValue?) -> String {
        let candidates = [name] + (2...1000).map { "\(name)_\($0)" }
        return candidates.first { originals[$0] == nil || originals[$0] == schema } ?? name
    }
}

extension JSONObject {
    /// The members that an array of names mentions, in its order, and then the others.
    fileprivate func ordered(by names: JSONValue?) -> JSONObject {
        guard case .array(let names) = names else { return self }
        let first = names.compactMap(\.string).filter { self[$0] != nil }
        let rest = keys.filter { !first.contains($0) }
        return JSONObject((first + rest).compactMap { name in self[name].map { (name, $0) } })
    }
}
