import Foundation

/// The form of generated values. It encodes to JSON Schema, with the order of properties in `x-order`.
public struct GenerationSchema: Sendable {
    let document: GeneratedContent

    public var name: String { document["title"]?.text ?? document["type"]?.text ?? "" }

    init(document: GeneratedContent) { self.document = document }

    init(scalar type: String) { document = GeneratedContent(properties: ["type": type]) }

    public init(root: DynamicGenerationSchema, dependencies: [DynamicGenerationSchema]) throws {
        var definitions: [String: GeneratedContent] = [:]
        let content = root.content(into: &definitions, isRoot: true)
        for dependency in dependencies { _ = dependency.content(into: &definitions, isRoot: false) }
        document = definitions.isEmpty ? content : content.adding("$defs", .object(definitions.sorted { $0.key < $1.key }))
    }
}

extension GenerationSchema: Codable {
    public init(from decoder: any Decoder) throws { document = try GeneratedContent(from: decoder) }
    public func encode(to encoder: any Encoder) throws { try document.encode(to: encoder) }
}

/// A schema that is put together at run time.
public struct DynamicGenerationSchema: Sendable {
    public struct Property: Sendable {
        let name: String
        let description: String?
        let schema: DynamicGenerationSchema
        let isOptional: Bool

        public init(name: String, description: String? = nil, schema: DynamicGenerationSchema, isOptional: Bool = false) {
            (self.name, self.description, self.schema, self.isOptional) = (name, description, schema, isOptional)
        }
    }

    indirect enum Form: Sendable {
        case object([Property])
        case choices([String])
        case anyOf([DynamicGenerationSchema])
        case array(DynamicGenerationSchema, Int?, Int?)
        case value(GenerationSchema)
        case reference
    }

    let name: String?
    let description: String?
    let form: Form

    private init(_ name: String?, _ description: String?, _ form: Form) {
        (self.name, self.description, self.form) = (name, description, form)
    }

    public init(name: String, description: String? = nil, properties: [Property]) { self.init(name, description, .object(properties)) }

    public init(name: String, description: String? = nil, anyOf choices: [String]) { self.init(name, description, .choices(choices)) }

    public init(name: String, description: String? = nil, anyOf choices: [DynamicGenerationSchema]) {
        self.init(name, description, .anyOf(choices))
    }

    public init(arrayOf itemSchema: DynamicGenerationSchema, minimumElements: Int? = nil, maximumElements: Int? = nil) {
        self.init(nil, nil, .array(itemSchema, minimumElements, maximumElements))
    }

    public init<Value: Generable>(type: Value.Type) { self.init(nil, nil, .value(Value.generationSchema)) }

    public init(referenceTo name: String) { self.init(name, nil, .reference) }
}

extension DynamicGenerationSchema {
    /// The JSON Schema of this one. Named parts go to the definitions, and a reference takes their place.
    func content(into definitions: inout [String: GeneratedContent], isRoot: Bool) -> GeneratedContent {
        switch form {
        case .reference: return .reference(to: name ?? "")
        case .value(let schema): return schema.document
        case .array(let items, let least, let most):
            var content = GeneratedContent(properties: ["type": "array"]).adding("items", items.content(into: &definitions, isRoot: false))
            if let least { content = content.adding("minItems", least.generatedContent) }
            if let most { content = content.adding("maxItems", most.generatedContent) }
            return content
        case .choices(let texts):
            let values = GeneratedContent(elements: texts)
            return place(GeneratedContent(properties: ["type": "string", "enum": values]), &definitions, isRoot)
        case .anyOf(let schemas):
            let parts = schemas.map { $0.content(into: &definitions, isRoot: false) }
            return place(GeneratedContent(properties: ["anyOf": GeneratedContent(elements: parts)]), &definitions, isRoot)
        case .object(let properties):
            return place(object(properties, &definitions), &definitions, isRoot)
        }
    }

    private func object(_ properties: [Property], _ definitions: inout [String: GeneratedContent]) -> GeneratedContent {
        let members = properties.map { property in
            let content = property.schema.content(into: &definitions, isRoot: false)
            return (key: property.name, value: property.description.map { content.adding("description", $0.generatedContent) } ?? content)
        }
        let required = GeneratedContent(elements: properties.filter { !$0.isOptional }.map(\.name))
        let order = GeneratedContent(elements: properties.map(\.name))
        let object = GeneratedContent(properties: ["type": "object", "required": required, "x-order": order, "additionalProperties": false])
        return object.adding("properties", .object(members))
    }

    private func place(_ content: GeneratedContent, _ definitions: inout [String: GeneratedContent], _ isRoot: Bool) -> GeneratedContent {
        guard let name else { return content }
        var named = content.adding("title", name.generatedContent)
        if let description { named = named.adding("description", description.generatedContent) }
        if isRoot { return named }
        definitions[name] = named
        return .reference(to: name)
    }
}

extension GeneratedContent {
    static func object(_ members: [(key: String, value: GeneratedContent)]) -> GeneratedContent {
        let properties = Dictionary(members.map { ($0.key, $0.value) }) { $1 }
        return GeneratedContent(kind: .structure(properties: properties, orderedKeys: members.map(\.key)))
    }

    static func reference(to name: String) -> GeneratedContent { GeneratedContent(properties: ["$ref": "#/$defs/\(name)"]) }

    subscript(key: String) -> GeneratedContent? {
        if case .structure(let properties, _) = kind { properties[key] } else { nil }
    }

    var text: String? { if case .string(let text) = kind { text } else { nil } }

    func adding(_ key: String, _ value: GeneratedContent) -> GeneratedContent {
        guard case .structure(var properties, let keys) = kind else { return self }
        properties[key] = value
        return GeneratedContent(kind: .structure(properties: properties, orderedKeys: keys.filter { $0 != key } + [key]))
    }
}
